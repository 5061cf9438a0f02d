"""Measurements -> the text of a cluster file. Every number says where, with what and when it was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...cost_models.hardware import AttentionCurve, GemmCurve, Gpu
from ...cost_models.hardware.curve import Curve
from ...cost_models.units import GB, GIB, MICROSECOND, NANOSECOND, TERA
from .fit import LinkFit, fit_attention, fit_link, fit_products, fit_rate, rising
from .measurements import Measurements

_DIGITS = 4
_LEAST_SECONDS = 1e-9
_ALONE = "one device was measured and nothing beside it: copies within its memory stand for a link"


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """The numbers of a cluster file: table path -> key -> value, in the file's order."""

    description: str
    source: str
    tables: Mapping[str, Mapping[str, object]]

    def values(self) -> dict[str, dict[str, object]]:
        """Table path -> key -> plain value, for JSON."""
        return {
            path: {key: value[0] if isinstance(value, Sourced) else value for key, value in table.items()}
            for path, table in self.tables.items()
        }

    def text(self) -> str:
        """As TOML."""
        lines = [f"description = {json.dumps(self.description)}"]
        for path, values in self.tables.items():
            if path:
                lines += ["", f"[{path}]"]
            for key, value in values.items():
                if isinstance(value, str):
                    lines.append(f"{key} = {json.dumps(value)}")
                else:
                    number, source = value if isinstance(value, Sourced) else (value, self.source)
                    lines.append(f"{key} = {{ value = {_number(number)}, source = {json.dumps(source)} }}")
        return "\n".join(lines) + "\n"


class Sourced(NamedTuple):
    """A number that has a source of its own."""

    value: object
    source: str


def _number(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_number, value)) + "]"
    if isinstance(value, int):
        return str(value)
    assert isinstance(value, float)
    text = f"{value:.{_DIGITS}g}"
    return str(int(float(text))) if float(text) == int(float(text)) else repr(float(text))


def describe(found: Measurements, *, source: str) -> Document:
    """The cluster file of what was measured."""
    launches, machinery = found.launches, found.machinery
    is_cpu = found.device == "cpu"
    bandwidth = _best_rate(found)
    blank = _blank(found, bandwidth)
    # CPU products have no tiles to fill. A launch is part of every operation where the host is the device.
    first = "float32" if is_cpu else "bfloat16"
    start = min(time.seconds for time in found.products[first])
    start = min(start, launches.host_seconds) if is_cpu else min(start, 2 * launches.device_seconds)
    peak, curve = fit_products(blank, found.products[first], first, start_seconds=start, tiled=not is_cpu)
    fitted = replace(blank, gemm=curve)
    rates = {first: peak}
    for dtype, times in found.products.items():
        if dtype != first:
            rates[dtype] = fit_rate(fitted, times, "float32" if dtype == "tf32" else dtype, dtype)
    attention = fit_attention(
        found.attention,
        rates[first] * found.sustained_fraction,
        forward_seconds=launches.device_seconds,
        backward_seconds=launches.backward_seconds if is_cpu else launches.device_seconds,
    )
    tables: dict[str, Mapping[str, object]] = {
        "": {"gpus_per_node": found.ranks},
        "gpu": _gpu(found, bandwidth),
        "gpu.peak_tflops": {name: rate / TERA for name, rate in rates.items()},
        "gpu.gemm": _gemm(curve),
        "gpu.attention": _attention(attention),
    }
    if is_cpu:
        tables |= _streams(found)
    tables |= {
        f"gpu.updates.{name}": {
            "tensor_microseconds": update.tensor_seconds / MICROSECOND,
            "sharded_tensor_microseconds": update.sharded_tensor_seconds / MICROSECOND,
            "gb_per_second": 1 / update.seconds_per_byte / GB,
        }
        for name, update in machinery.updates.items()
    }
    tables["gpu.host"] = _host(found)
    tables |= _links(found, bandwidth)
    where = "CPU cores, gloo between them" if is_cpu else "GPUs, NCCL between them"
    return Document(description=f"{found.ranks} ranks on {found.device_name}: {where}", source=source, tables=tables)


def _best_rate(found: Measurements) -> float:
    """Bytes a second of the largest operations."""
    size, ahead, back = found.streaming[-1]
    return 5 * size / (ahead + back)


def _blank(found: Measurements, bandwidth: float) -> Gpu:
    """A device that lacks what is still to be fitted."""
    return Gpu(
        name="measured", description="measured", hbm_bytes=found.memory.num_bytes, hbm_bytes_per_second=bandwidth,
        hbm_fraction=1.0, peak_flops_per_second={"float32": 1.0, "float64": 1.0}, sm_count=found.sm_count,
        sustained_fraction=1.0,
        gemm=GemmCurve(rate_fraction=1.0, start_seconds=0.0, k_overhead=0.0, tile_penalty=0.0),
        attention=AttentionCurve(peak_fraction=1.0, short_keys=0.0, backward_fraction=1.0),
        launch_seconds=0.0, kernel_seconds=0.0, overhead_bytes=0, sources=(),
    )  # fmt: skip


def _gpu(found: Measurements, bandwidth: float) -> dict[str, object]:
    launches = found.launches
    is_cpu = found.device == "cpu"
    values: dict[str, object] = {
        "description": f"{found.device_name}, one rank" + (" with one thread" if is_cpu else ""),
        "hbm_gib": found.memory.num_bytes / GIB,
        "hbm_gb_per_second": bandwidth / GB,
        "hbm_fraction": Sourced(1.0, "the rate is what operations reached"),
        "sm_count": found.sm_count,
        "sustained_fraction": found.sustained_fraction,
        "launch_microseconds": Sourced(0, "host and device are the same thread: kernel_microseconds has it")
        if is_cpu
        else launches.host_seconds / MICROSECOND,
        "kernel_microseconds": launches.device_seconds / MICROSECOND,
        "overhead_gib": found.memory.overhead_bytes / GIB,
    }
    if is_cpu:
        values["kernel_backward_microseconds"] = launches.backward_seconds / MICROSECOND
        values["transcendental_nanoseconds"] = found.transcendental_seconds / NANOSECOND
    return values


def _gemm(curve: GemmCurve) -> dict[str, object]:
    values: dict[str, object] = {
        "rate_fraction": curve.rate_fraction,
        "start_microseconds": curve.start_seconds / MICROSECOND,
        "k_overhead": curve.k_overhead,
        "tile_penalty": curve.tile_penalty,
    }
    if curve.m_overhead is not None and curve.n_overhead is not None:
        values |= {"m_overhead": curve.m_overhead, "n_overhead": curve.n_overhead}
    return values


def _attention(curve: AttentionCurve) -> dict[str, object]:
    return {
        "peak_fraction": curve.peak_fraction,
        "short_keys": curve.short_keys,
        "backward_fraction": curve.backward_fraction,
    }


def _curve(num_bytes: Sequence[int], seconds: Sequence[float]) -> dict[str, object]:
    rounded = [float(f"{value / MICROSECOND:.{_DIGITS}g}") for value in rising(seconds, floor=_LEAST_SECONDS)]
    Curve(num_bytes=tuple(num_bytes), seconds=tuple(value * MICROSECOND for value in rounded))
    return {"bytes": [int(size) for size in num_bytes], "microseconds": rounded}


def _streams(found: Measurements) -> dict[str, Mapping[str, object]]:
    """Seconds by the bytes that an operation reads and writes, beside what every operation takes."""
    launches = found.launches
    ahead = [seconds - launches.device_seconds for _, seconds, _ in found.streaming]
    back = [seconds - launches.backward_seconds for _, _, seconds in found.streaming]
    return {
        "gpu.streaming": _curve([2 * size for size, _, _ in found.streaming], ahead),
        "gpu.streaming_backward": _curve([3 * size for size, _, _ in found.streaming], back),
    }


def _host(found: Measurements) -> dict[str, object]:
    machinery, launches = found.machinery, found.launches
    small = min((time.seconds for time in found.messages if time.op == "all_reduce"), default=0.0)
    seconds = {
        "view_forward": launches.view_seconds,
        "node_backward": launches.view_backward_seconds,
        "conversion_forward": machinery.conversion[0],
        "conversion_backward": machinery.conversion[1],
        "parameter_forward": machinery.parameter[0],
        "parameter_backward": machinery.parameter[1],
        "fsdp_group_forward": machinery.fsdp_group[0],
        "fsdp_group_backward": machinery.fsdp_group[1],
        "fsdp_parameter_forward": machinery.fsdp_parameter[0],
        "fsdp_parameter_backward": machinery.fsdp_parameter[1],
        "checkpoint": machinery.checkpoint_seconds,
        "action": machinery.action_seconds,
        # The norm and the loss are added up over all ranks.
        "step": 2 * small,
    }
    return {f"{name}_microseconds": value / MICROSECOND for name, value in seconds.items()}


def _links(found: Measurements, bandwidth: float) -> dict[str, Mapping[str, object]]:
    kind = "host" if found.device == "cpu" else "switch"
    if not found.messages:
        nothing = Sourced(0, _ALONE)
        rate = Sourced(bandwidth / GB, _ALONE)
        link: dict[str, object] = {
            "kind": kind, "bus_gb_per_second": rate, "send_gb_per_second": rate, "latency_microseconds": nothing,
            "latency_per_rank_microseconds": nothing, "ramp_microseconds": nothing,
        }  # fmt: skip
        return {"intra_node": link}
    fitted: LinkFit = fit_link(found.messages)
    link = {
        "kind": kind,
        "bus_gb_per_second": fitted.bytes_per_second / GB,
        "send_gb_per_second": fitted.send_bytes_per_second / GB,
        "latency_microseconds": fitted.latency_seconds / MICROSECOND,
        "latency_per_rank_microseconds": fitted.latency_per_rank_seconds / MICROSECOND,
        "ramp_microseconds": Sourced(0, "the measured curves have it"),
    }
    if found.hidden_fraction is not None:
        link["hidden_fraction"] = found.hidden_fraction
    tables: dict[str, Mapping[str, object]] = {"intra_node": link}
    for op in dict.fromkeys(time.op for time in found.messages):
        for ranks in dict.fromkeys(time.ranks for time in found.messages):
            mine = [time for time in found.messages if time.op == op and time.ranks == ranks]
            # A send has two ends, however many ranks there are.
            if mine and (op != "send" or ranks == 2):
                tables[f"intra_node.measured.{op}.{ranks}"] = _curve(
                    [time.num_bytes for time in mine], [time.seconds for time in mine]
                )
    return tables
