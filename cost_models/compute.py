"""Work -> seconds on one device: products by their shape, fused attention, memory-bound operations, and launches.

A product of (m, k) by (k, n) is cut into tiles that fill the device in waves:

    t = t0 + min over tiles (tm, tn) and split-k sk of
        ceil(batch * ceil(m/tm) * ceil(n/tn) * sk / SM) * (k/sk + k0) * 2 tm tn SM / (peak * R * e(tm, tn) * s)
        + (t0/2 to add the parts, if sk > 1)
    e = 1 - 100 te (1/sqrt(tm tn) - 1/sqrt(256*128))

with R, t0, k0, te from the device's file (`GemmCurve`) and s its sustained fraction. Fused attention of n keys runs
at e0 / (1 + s0/n) of the sustained peak. All else takes its bytes at the sustained memory bandwidth, and every kernel a
small
constant.
In eager mode the host needs `launch_seconds` per kernel: a run takes the longer of device and host.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil, sqrt

from .hardware import Gpu
from .stacks import EAGER, Stack
from .work import FLOPS_PER_MULTIPLY_ADD, Gemm, Pass, Work

_TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4, 8)
_LARGEST_TILE_SIDE = sqrt(256 * 128)

# What is left of pointwise traffic and of launches when chains are fused.
# Source: published eager and compiled runs of one 8B decoder on H100 (2.84 s and 2.46 s a step).
_COMPILED_TRAFFIC_FRACTION = 0.4
_COMPILED_LAUNCH_FRACTION = 0.4

# Matrix units want rows of 16 bytes. Source: published runs with head_dim 108 (batched), swiglu widths on H100 (plain).
_ALIGNMENT_BYTES = 16
_MISALIGNED_BATCHED_FRACTION = 0.076
_MISALIGNED_FRACTION = 0.76

# Fused attention backward recomputes the scores: 5 products instead of 2, on twice the tensors.
_BACKWARD_KEYS_FACTOR = 2 / 2.5

# dtype of a graph -> (rate name, bytes of an item). Integer products run on the float32 units.
_RATES: dict[str, tuple[str, int]] = {
    "float64": ("float64", 8), "float32": ("float32", 4), "bfloat16": ("bfloat16", 2), "float16": ("float16", 2),
    "float8_e4m3fn": ("float8", 1), "float8_e5m2": ("float8", 1), "complex64": ("float32", 8),
    "complex128": ("float64", 16), "int64": ("float32", 8), "int32": ("float32", 4), "int16": ("float32", 2),
    "int8": ("float32", 1), "uint8": ("float32", 1), "bool": ("float32", 1),
}  # fmt: skip


def _rate_and_item_bytes(dtype: str, stack: Stack, gpu: Gpu) -> tuple[str, int]:
    name, item_bytes = _RATES[dtype]
    if name == "float32" and stack.float32_matmul == "tf32" and "tf32" in gpu.peak_flops_per_second:
        name = "tf32"
    return name, item_bytes


@lru_cache(maxsize=1 << 16)
def _tiled_seconds(
    m: int,
    n: int,
    k: int,
    batch: int,
    sm_count: int,
    rate: float,
    k_overhead: float,
    tile_penalty: float,
    adding_seconds: float,
) -> float:
    best = float("inf")
    for tm, tn in _TILES:
        efficiency = 1 - 100 * tile_penalty * (1 / sqrt(tm * tn) - 1 / _LARGEST_TILE_SIDE)
        tiles = batch * ceil(m / tm) * ceil(n / tn)
        tile_seconds = FLOPS_PER_MULTIPLY_ADD * tm * tn * sm_count / (rate * efficiency)
        for split in _SPLITS:
            adding = adding_seconds if split > 1 else 0.0
            best = min(best, ceil(tiles * split / sm_count) * (k / split + k_overhead) * tile_seconds + adding)
            if tiles >= 4 * sm_count:
                break  # splitting k only helps while the device is not full
    return best


def gemm_seconds(gemm: Gemm, gpu: Gpu, *, dtype: str, stack: Stack = EAGER) -> float:
    """Device time of one (batched) product, without its memory bound.

    Raises:
        HardwareError: the device has no rate for `dtype`.
    """
    if not gemm.flops:
        return 0.0
    name, item_bytes = _rate_and_item_bytes(dtype, stack, gpu)
    rate = gpu.rate(name)
    curve = gpu.gemm
    if curve.m_overhead is not None and curve.n_overhead is not None:
        sides = (gemm.m + curve.m_overhead) * (gemm.n + curve.n_overhead) * (gemm.k + curve.k_overhead)
        reached = rate * curve.rate_fraction * gpu.sustained_fraction
        return curve.start_seconds + FLOPS_PER_MULTIPLY_ADD * gemm.batch * sides / reached
    seconds = _tiled_seconds(
        gemm.m,
        gemm.n,
        gemm.k,
        gemm.batch,
        gpu.sm_count,
        rate * curve.rate_fraction * gpu.sustained_fraction,
        curve.k_overhead,
        curve.tile_penalty,
        curve.start_seconds / 2,
    )
    if rate > gpu.rate("float32") and (
        gemm.n * item_bytes % _ALIGNMENT_BYTES or gemm.k * item_bytes % _ALIGNMENT_BYTES
    ):
        seconds /= _MISALIGNED_BATCHED_FRACTION if gemm.batch > 1 else _MISALIGNED_FRACTION
    return curve.start_seconds + seconds


def attention_seconds(
    flops: int, num_bytes: int, gpu: Gpu, *, dtype: str, stack: Stack = EAGER, is_backward: bool = False
) -> float:
    """Device time of fused attention: `flops` (what causal masking skips left out), `num_bytes` read and written.

    Flops per byte are half the number of keys over the item size, so the short-sequence term is a cost per byte.
    """
    if not flops:
        return 0.0
    name, item_bytes = _rate_and_item_bytes(dtype, stack, gpu)
    curve = gpu.attention
    rate = (
        gpu.rate(name)
        * gpu.sustained_fraction
        * curve.peak_fraction
        * (curve.backward_fraction if is_backward else 1.0)
    )
    if stack.attention == "flash 1":
        rate *= curve.first_generation_fraction
    keys = 2 * item_bytes * flops / max(num_bytes, 1) * (_BACKWARD_KEYS_FACTOR if is_backward else 1.0)
    return flops * (1 + curve.short_keys / keys) / rate


def device_seconds(p: Pass, gpu: Gpu, *, dtype: str, stack: Stack = EAGER, is_backward: bool = False) -> float:
    """Time that the kernels of a pass keep the device busy.

    Raises:
        HardwareError: the device has no rate for `dtype`.
    """
    bandwidth = gpu.hbm_bytes_per_second * gpu.hbm_fraction
    _, item_bytes = _rate_and_item_bytes(dtype, stack, gpu)
    products = sum(gemm_seconds(gemm, gpu, dtype=dtype, stack=stack) for gemm in p.gemms)
    # An implicit convolution reads less than its product's operands: never more than the pass moves in all.
    product_bytes = min(p.bytes, sum(gemm.num_elements for gemm in p.gemms) * item_bytes)
    products = max(products, product_bytes / bandwidth)
    attention = attention_seconds(
        p.attention_flops, p.attention_bytes, gpu, dtype=dtype, stack=stack, is_backward=is_backward
    )
    other_bytes: float = max(0, p.bytes - product_bytes - p.attention_bytes)
    if stack.fusion == "compiled":
        other_bytes *= _COMPILED_TRAFFIC_FRACTION
    fraction = _COMPILED_LAUNCH_FRACTION if stack.fusion == "compiled" else 1.0
    small_kernels = max(0, p.kernels - len(p.gemms)) * fraction
    others = max(
        streaming_seconds(other_bytes, max(1.0, small_kernels), gpu, is_backward=is_backward),
        p.flops / gpu.rate("float32"),
        p.transcendentals * gpu.transcendental_seconds,
    )
    each = gpu.kernel_backward_seconds if is_backward else gpu.kernel_seconds
    # A product's own start is that of a forward.
    starting = len(p.gemms) * (gpu.kernel_backward_seconds - gpu.kernel_seconds) if is_backward else 0.0
    return products + attention + others + small_kernels * each + starting


def streaming_seconds(num_bytes: float, kernels: float, gpu: Gpu, *, is_backward: bool = False) -> float:
    """Time of memory-bound kernels that read and write `num_bytes` together, beside what each kernel takes."""
    curve = gpu.streaming_backward if is_backward else gpu.streaming
    if curve is None:
        return num_bytes / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
    return kernels * curve.at(num_bytes / kernels) if num_bytes else 0.0


def host_seconds(p: Pass, gpu: Gpu, *, stack: Stack = EAGER) -> float:
    """Time the host needs to launch the kernels of a pass."""
    fraction = _COMPILED_LAUNCH_FRACTION if stack.fusion == "compiled" else 1.0
    return p.kernels * gpu.launch_seconds * fraction


def pass_seconds(p: Pass, gpu: Gpu, *, dtype: str, stack: Stack = EAGER, is_backward: bool = False) -> float:
    """The longer of device and host time. For a long run of operations add their passes first: the host runs ahead.

    Raises:
        HardwareError: the device has no rate for `dtype`.
    """
    device = device_seconds(p, gpu, dtype=dtype, stack=stack, is_backward=is_backward)
    return max(device, host_seconds(p, gpu, stack=stack))


def work_seconds(work: Work, gpu: Gpu, stack: Stack = EAGER) -> tuple[float, float]:
    """(forward, backward) seconds of an operation, or of a unit whose works were added.

    Raises:
        HardwareError: the device has no rate for the dtype.
    """
    return (
        pass_seconds(work.forward, gpu, dtype=work.dtype, stack=stack),
        pass_seconds(work.backward, gpu, dtype=work.dtype, stack=stack, is_backward=True),
    )
