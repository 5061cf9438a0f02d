"""Predictions beside measurements -> errors per family, memory, out-of-memory calls, and the quality of choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean

from .rows import Row

_SMALLEST_SWEEP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row. `reason` is why it has no prediction, "" if it has one."""

    row: Row
    reason: str = ""
    predicted_seconds: float | None = None
    predicted_memory_gib: float | None = None
    fits: bool | None = None
    microbatch: int | None = None
    interleave: int | None = None
    spread_percent: float = 0.0

    @property
    def error_percent(self) -> float | None:
        if self.predicted_seconds is None or not self.row.measured_seconds:
            return None
        return 100 * (self.predicted_seconds / self.row.measured_seconds - 1)

    @property
    def memory_error_percent(self) -> float | None:
        if self.predicted_memory_gib is None or not self.row.peak_memory_gib:
            return None
        return 100 * (self.predicted_memory_gib / self.row.peak_memory_gib - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScore:
    """None: the family has no such measurement. `clean_*`: without the rows that are marked as contaminated."""

    n: int
    mape_percent: float | None
    bias_percent: float | None
    max_percent: float | None
    clean_n: int
    clean_mape_percent: float | None
    clean_bias_percent: float | None
    clean_max_percent: float | None
    memory_n: int
    memory_mape_percent: float | None
    clean_memory_n: int
    clean_memory_mape_percent: float | None
    oom_correct_fraction: float | None
    feasible_correct_fraction: float | None
    sweeps: int
    regret_percent_mean: float | None
    kendall_tau: float | None
    not_expressed: int


def family_scores(results: Sequence[Result]) -> dict[str, FamilyScore]:
    """Every family, in order of first appearance; its rows with products of 8 bits apart, as "NAME fp8"."""
    by_family: dict[str, list[Result]] = {}
    for result in results:
        by_family.setdefault(result.row.scored_as, []).append(result)
    return {family: _score(mine) for family, mine in by_family.items()}


@dataclass(frozen=True, slots=True)
class _Errors:
    values: tuple[float, ...]

    def mape(self) -> float | None:
        return mean(map(abs, self.values)) if self.values else None

    def bias(self) -> float | None:
        return mean(self.values) if self.values else None

    def largest(self) -> float | None:
        return max(self.values, key=abs) if self.values else None


def _score(results: Sequence[Result]) -> FamilyScore:
    clean_results = [result for result in results if not result.row.contaminated]
    errors, clean = (
        _Errors(tuple(e for e in (result.error_percent for result in some) if e is not None))
        for some in (results, clean_results)
    )
    memory, clean_memory = (
        _Errors(tuple(e for e in (result.memory_error_percent for result in some) if e is not None))
        for some in (results, clean_results)
    )
    called = [result for result in results if result.fits is not None]
    oom = [not result.fits for result in called if result.row.ran_out_of_memory]
    ran = [bool(result.fits) for result in called if result.row.measured_seconds]
    sweeps = _sweeps(results)
    return FamilyScore(
        n=len(errors.values),
        mape_percent=errors.mape(),
        bias_percent=errors.bias(),
        max_percent=errors.largest(),
        clean_n=len(clean.values),
        clean_mape_percent=clean.mape(),
        clean_bias_percent=clean.bias(),
        clean_max_percent=clean.largest(),
        memory_n=len(memory.values),
        memory_mape_percent=memory.mape(),
        clean_memory_n=len(clean_memory.values),
        clean_memory_mape_percent=clean_memory.mape(),
        oom_correct_fraction=mean(oom) if oom else None,
        feasible_correct_fraction=mean(ran) if ran else None,
        sweeps=len(sweeps),
        regret_percent_mean=mean(regret_percent(s) for s in sweeps) if sweeps else None,
        kendall_tau=mean(kendall_tau(s) for s in sweeps) if sweeps else None,
        not_expressed=sum(bool(result.reason) for result in results),
    )


def _sweeps(results: Sequence[Result]) -> list[list[Result]]:
    """Runs of one model by one software on one cluster, of one batch, in several configurations."""
    groups: dict[tuple[object, ...], list[Result]] = {}
    for result in results:
        row = result.row
        if result.error_percent is None:
            continue
        sizes = (row.layers, row.hidden, row.ffn, row.heads, row.vocab, row.seq_len)
        key = (row.model, *sizes, row.gpu, row.gpus, row.global_batch, row.precision, row.float8)
        groups.setdefault(key, []).append(result)
    return [group for group in groups.values() if len({_configuration(r.row) for r in group}) >= _SMALLEST_SWEEP]


def _configuration(row: Row) -> tuple[object, ...]:
    return row.tp, row.pp, row.dp, row.vpp, row.microbatch, row.fsdp, row.checkpointing


def _times(sweep: Sequence[Result]) -> list[tuple[float, float]]:
    return [(r.predicted_seconds or 0.0, r.row.measured_seconds or 0.0) for r in sweep]


def regret_percent(sweep: Sequence[Result]) -> float:
    """Measured time of what the model ranks first, over the best measured."""
    times = _times(sweep)
    return 100 * (min(times)[1] / min(measured for _, measured in times) - 1)


def kendall_tau(sweep: Sequence[Result]) -> float:
    """Pairs in the same order minus pairs in the other, over all pairs (tau-a)."""
    pairs = list(combinations(_times(sweep), 2))
    return sum(_sign(a[0] - b[0]) * _sign(a[1] - b[1]) for a, b in pairs) / len(pairs)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
