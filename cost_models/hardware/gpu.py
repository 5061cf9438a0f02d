"""What a device can do: capacity, rates, and the few constants of its GEMM and attention curves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..errors import HardwareError
from ..units import GB, GIB, MICROSECOND, NANOSECOND, TERA
from .curve import Curve, parse_curve
from .host import NO_HOST_COSTS, HostCosts, UpdateCosts, parse_host, parse_update
from .toml_file import Table, nearest

# Host time of a pipeline schedule beside the operations of the stages, in eager operations: of one action (a microbatch
# forward or backward through a stage: bookkeeping, sends and receives, one call of autograd), and of a step.
# Source: measured: benchmarks/pipeline_host.py, torch 2.13.0 on 2 gloo ranks of a busy 2-core x86 host, CPU time of the
# main thread: medians over the schedules of 63 (from 21 to 151) an action and 155 a step.
LAUNCHES_PER_PIPELINE_ACTION = 60
LAUNCHES_PER_PIPELINE_STEP = 150

UPDATES = ("adamw", "sgd", "clip")
_LARGEST_GIB = 1e6  # of one device
# Rates a file may give. "tf32" is what float32 products use where the stack allows it.
RATE_NAMES = ("float64", "float32", "tf32", "bfloat16", "float16", "float8")

# Where a file does not say. Source: published runs of both generations on H100 and H200.
FIRST_GENERATION_FRACTION = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmCurve:
    """Constants of `compute.gemm_seconds`. Source of the form: docs/accuracy.md, measured tables per file.

    rate_fraction: best fraction of the peak that the largest tile reaches in a short burst.
    start_seconds: launch, prologue and epilogue of one product.
    k_overhead: loop iterations' worth of k that filling the pipeline of a tile costs.
    tile_penalty: loss of efficiency of small tiles.
    m_overhead, n_overhead: where they are given the device has no tiles to fill: every side of a product costs so
    much more, 2 (m + m0) (n + n0) (k + k0) flops in all.
    """

    rate_fraction: float
    start_seconds: float
    k_overhead: float
    tile_penalty: float
    m_overhead: float | None = None
    n_overhead: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCurve:
    """Fused attention: `peak_fraction / (1 + short_keys / keys)` of the matrix peak forward.

    Backward runs at `backward_fraction` of that rate, kernels of the first generation at `first_generation_fraction`.
    """

    peak_fraction: float
    short_keys: float
    backward_fraction: float
    first_generation_fraction: float = FIRST_GENERATION_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gpu:
    """One device, as one rank sees it.

    `peak_flops_per_second` is dense, by rate name (RATE_NAMES). `sustained_fraction` is what power and clocks leave of
    a short burst over a training run. `launch_seconds` is host time per eager kernel, `kernel_seconds` device time that
    a kernel takes beside its traffic (`kernel_backward_seconds` in a backward). `overhead_bytes` is taken by context,
    libraries and allocator. Compared and hashed by identity.

    Measured on the device where it was profiled, else None or 0: `streaming`, seconds of a memory-bound kernel by its
    bytes, beside `kernel_seconds`; `transcendental_seconds` of one exponential, logarithm or the like; `host`;
    `updates` by optimizer, and "clip".
    """

    name: str
    description: str
    hbm_bytes: int
    hbm_bytes_per_second: float
    hbm_fraction: float
    peak_flops_per_second: Mapping[str, float]
    sm_count: int
    sustained_fraction: float
    gemm: GemmCurve
    attention: AttentionCurve
    launch_seconds: float
    kernel_seconds: float
    overhead_bytes: int
    sources: tuple[tuple[str, str], ...]
    kernel_backward_seconds: float = 0.0
    transcendental_seconds: float = 0.0
    streaming: Curve | None = None
    streaming_backward: Curve | None = None
    host: HostCosts = NO_HOST_COSTS
    updates: Mapping[str, UpdateCosts] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Whether host and device are the same thread: nothing runs ahead, and nothing beside."""
        return self.launch_seconds == 0

    def at_best_rates(self) -> Gpu:
        """The device with every memory-bound kernel at the best rate of any size: for lower bounds."""
        if self.streaming is None or self.streaming_backward is None:
            return self
        rate = 1 / min(self.streaming.least_seconds_per_byte, self.streaming_backward.least_seconds_per_byte)
        return replace(self, hbm_bytes_per_second=rate, hbm_fraction=1.0, streaming=None, streaming_backward=None)

    @property
    def pipeline_action_seconds(self) -> float:
        """Host time of one action of a pipeline schedule, measured or counted in launches."""
        return self.host.action_seconds or LAUNCHES_PER_PIPELINE_ACTION * self.launch_seconds

    @property
    def pipeline_step_seconds(self) -> float:
        """Host time of a step of a pipeline schedule that does not grow with its actions."""
        return LAUNCHES_PER_PIPELINE_STEP * self.launch_seconds

    def rate(self, name: str) -> float:
        """Dense peak of a rate.

        Raises:
            HardwareError: the device has none.
        """
        try:
            return self.peak_flops_per_second[name]
        except KeyError:
            have = ", ".join(self.peak_flops_per_second)
            raise HardwareError(
                f"{self.name} has no {name} matrix rate (it has: {have})", fix="choose another precision or cluster"
            ) from None


def parse_gpu(name: str, table: Table) -> Gpu:
    """A Gpu from its table.

    Raises:
        HardwareError: a key is missing, unknown or absurd.
    """
    table.check_keys(
        ("description", "hbm_gib", "hbm_gb_per_second", "hbm_fraction", "sm_count", "sustained_fraction")
        + ("launch_microseconds", "kernel_microseconds", "overhead_gib", "peak_tflops", "gemm", "attention")
        + ("kernel_backward_microseconds", "transcendental_nanoseconds", "streaming", "streaming_backward")
        + ("host", "updates")
    )
    peaks, gemm, attention = table.table("peak_tflops"), table.table("gemm"), table.table("attention")
    peaks.check_keys(RATE_NAMES)
    gemm.check_keys(("rate_fraction", "start_microseconds", "k_overhead", "tile_penalty", "m_overhead", "n_overhead"))
    attention.check_keys(("peak_fraction", "short_keys", "backward_fraction", "first_generation_fraction"))
    for required in ("float64", "float32"):
        if not peaks.has(required):
            raise peaks.fail(required, "is missing")
    hbm_bytes = int(table.number("hbm_gib", high=_LARGEST_GIB) * GIB)
    overhead_bytes = int(table.number("overhead_gib", is_low_ok=True, high=_LARGEST_GIB) * GIB)
    if overhead_bytes >= hbm_bytes:
        raise table.fail("overhead_gib", "leaves no memory")
    if gemm.has("m_overhead") != gemm.has("n_overhead"):
        raise gemm.fail("m_overhead", "and n_overhead belong together", "give both or none")
    updates = table.table("updates") if table.has("updates") else None
    if updates is not None:
        updates.check_keys(UPDATES)
    kernel_seconds = table.number("kernel_microseconds", is_low_ok=True) * MICROSECOND
    return Gpu(
        name=name,
        description=table.text("description"),
        hbm_bytes=hbm_bytes,
        hbm_bytes_per_second=table.number("hbm_gb_per_second") * GB,
        hbm_fraction=table.number("hbm_fraction", high=1.0),
        peak_flops_per_second={rate: peaks.number(rate) * TERA for rate in RATE_NAMES if peaks.has(rate)},
        sm_count=table.count("sm_count"),
        sustained_fraction=table.number("sustained_fraction", high=1.0),
        gemm=GemmCurve(
            rate_fraction=gemm.number("rate_fraction", high=1.0),
            start_seconds=gemm.number("start_microseconds", is_low_ok=True) * MICROSECOND,
            k_overhead=gemm.number("k_overhead", is_low_ok=True),
            tile_penalty=gemm.number("tile_penalty", is_low_ok=True, high=0.9),
            m_overhead=gemm.number("m_overhead", is_low_ok=True) if gemm.has("m_overhead") else None,
            n_overhead=gemm.number("n_overhead", is_low_ok=True) if gemm.has("n_overhead") else None,
        ),
        attention=AttentionCurve(
            peak_fraction=attention.number("peak_fraction", high=1.0),
            short_keys=attention.number("short_keys", is_low_ok=True),
            backward_fraction=attention.number("backward_fraction", high=1.5),
            first_generation_fraction=(
                attention.number("first_generation_fraction", high=1.0)
                if attention.has("first_generation_fraction")
                else FIRST_GENERATION_FRACTION
            ),
        ),
        launch_seconds=table.number("launch_microseconds", is_low_ok=True) * MICROSECOND,
        kernel_seconds=kernel_seconds,
        kernel_backward_seconds=(
            table.number("kernel_backward_microseconds", is_low_ok=True) * MICROSECOND
            if table.has("kernel_backward_microseconds")
            else kernel_seconds
        ),
        transcendental_seconds=(
            table.number("transcendental_nanoseconds", is_low_ok=True) * NANOSECOND
            if table.has("transcendental_nanoseconds")
            else 0.0
        ),
        streaming=parse_curve(table.table("streaming")) if table.has("streaming") else None,
        streaming_backward=parse_curve(table.table("streaming_backward")) if table.has("streaming_backward") else None,
        host=parse_host(table.table("host")) if table.has("host") else NO_HOST_COSTS,
        updates={
            name: parse_update(updates.table(name)) for name in UPDATES if updates is not None and updates.has(name)
        },
        overhead_bytes=overhead_bytes,
        sources=tuple(sorted(table.sources.items())),
    )


__all__ = ["RATE_NAMES", "AttentionCurve", "GemmCurve", "Gpu", "nearest", "parse_gpu"]
