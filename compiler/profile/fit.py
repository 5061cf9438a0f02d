"""Times -> the few constants of the cost models' curves, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log

from ...cost_models.compute import gemm_seconds
from ...cost_models.hardware import AttentionCurve, GemmCurve, Gpu
from ...cost_models.work import Gemm
from .kernels import AttentionTime, ProductTime
from .messages import MessageTime

_LARGEST_TILE_PENALTY = 0.5
_FIRST_OVERHEADS = (2.0, 8.0, 32.0)
_ROUNDS = 60
_SHRINK = 0.6
_BACKWARD_LIMIT = 1.5  # of AttentionCurve.backward_fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Latency and bandwidth that come nearest to the messages, for groups of sizes that were not measured."""

    bytes_per_second: float
    send_bytes_per_second: float
    latency_seconds: float
    latency_per_rank_seconds: float


def descend(error: Callable[[Sequence[float]], float], start: Sequence[float]) -> tuple[float, ...]:
    """Positive numbers at which the error is small: one coordinate at a time by shrinking factors."""
    best, least = list(start), error(start)
    step = 1.0
    for _ in range(_ROUNDS):
        improved = False
        for index in range(len(best)):
            for factor in (1 + step, 1 / (1 + step)):
                trial = [*best]
                trial[index] *= factor
                found = error(trial)
                if found < least:
                    best, least, improved = trial, found, True
        if not improved:
            step *= _SHRINK
    return tuple(best)


def _log_error(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(log(predicted / measured) ** 2 for predicted, measured in pairs)


def fit_products(
    gpu: Gpu, times: Sequence[ProductTime], dtype: str, *, start_seconds: float, tiled: bool
) -> tuple[float, GemmCurve]:
    """(flops per second of an endless product, curve) of one dtype. `gpu` gives what is not fitted."""
    peak = max(2 * time.m * time.n * time.k / time.seconds for time in times)

    def curve(numbers: Sequence[float]) -> tuple[float, GemmCurve]:
        if tiled:
            rate, k_overhead, penalty = numbers
            return rate, GemmCurve(
                rate_fraction=1.0,
                start_seconds=start_seconds,
                k_overhead=k_overhead,
                tile_penalty=min(penalty, _LARGEST_TILE_PENALTY),
            )
        rate, m, n, k = numbers
        return rate, GemmCurve(
            rate_fraction=1.0, start_seconds=start_seconds, k_overhead=k, tile_penalty=0.0, m_overhead=m, n_overhead=n
        )

    def error(numbers: Sequence[float]) -> float:
        rate, found = curve(numbers)
        trial = replace(gpu, gemm=found, peak_flops_per_second={**gpu.peak_flops_per_second, dtype: rate})
        return _log_error([(gemm_seconds(Gemm(t.m, t.n, t.k), trial, dtype=dtype), t.seconds) for t in times])

    starts = [(peak, 64.0, 0.02)] if tiled else [(peak, o, o, o) for o in _FIRST_OVERHEADS]
    return curve(min((descend(error, start) for start in starts), key=error))


def fit_rate(gpu: Gpu, times: Sequence[ProductTime], dtype: str, name: str) -> float:
    """Peak flops per second at which a dtype meets its times with the curve that `gpu` has. `name`: of the rate."""

    def error(numbers: Sequence[float]) -> float:
        trial = replace(gpu, peak_flops_per_second={**gpu.peak_flops_per_second, dtype: numbers[0]})
        return _log_error([(gemm_seconds(Gemm(t.m, t.n, t.k), trial, dtype=dtype), t.seconds) for t in times])

    return descend(error, (max(2 * t.m * t.n * t.k / t.seconds for t in times),))[0]


def fit_attention(
    times: Sequence[AttentionTime], rate: float, *, forward_seconds: float, backward_seconds: float
) -> AttentionCurve:
    """`rate`: sustained flops per second; the others: what a kernel takes beside its work."""

    def pairs(numbers: Sequence[float]) -> list[tuple[float, float]]:
        fraction, short_keys, backward = numbers
        found: list[tuple[float, float]] = []
        for time in times:
            reached = rate * fraction * (backward if time.is_backward else 1.0)
            launch = 2 * backward_seconds if time.is_backward else forward_seconds
            found.append((launch + time.flops * (1 + short_keys / time.keys) / reached, time.seconds))
        return found

    fraction, short_keys, backward = descend(lambda numbers: _log_error(pairs(numbers)), (0.4, 64.0, 0.8))
    return AttentionCurve(
        peak_fraction=min(fraction, 1.0), short_keys=short_keys, backward_fraction=min(backward, _BACKWARD_LIMIT)
    )


def rising(values: Sequence[float], *, floor: float) -> tuple[float, ...]:
    """Each at least as large as the one before it: a larger message is never quicker."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1] if found else floor))
    return tuple(found)


def fit_link(times: Sequence[MessageTime]) -> LinkFit:
    """Latency and ring bandwidth of all groups together, and of point to point."""
    collectives = [time for time in times if time.op in ("all_reduce", "all_gather", "reduce_scatter")]
    sends = [time for time in times if time.op == "send"]

    def seconds(time: MessageTime, numbers: Sequence[float]) -> float:
        rate, latency, per_rank = numbers
        volume = (2 if time.op == "all_reduce" else 1) * (time.ranks - 1) / time.ranks
        return latency + time.ranks * per_rank + volume * time.num_bytes / rate

    largest = max(time.num_bytes / time.seconds for time in collectives)
    smallest = min(time.seconds for time in collectives)
    rate, latency, per_rank = descend(
        lambda numbers: _log_error([(seconds(time, numbers), time.seconds) for time in collectives]),
        (largest, smallest / 2, smallest / 4),
    )
    send_rate, _ = descend(
        lambda numbers: _log_error([(numbers[1] + t.num_bytes / numbers[0], t.seconds) for t in sends]),
        (max(t.num_bytes / t.seconds for t in sends), min(t.seconds for t in sends)),
    )
    return LinkFit(
        bytes_per_second=rate,
        send_bytes_per_second=send_rate,
        latency_seconds=latency,
        latency_per_rank_seconds=per_rank,
    )
