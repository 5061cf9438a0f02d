"""The fits find the constants that times were made from."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar.compiler.profile.fit import descend, fit_attention, fit_link, fit_products, fit_rate, rising
from autopar.compiler.profile.kernels import AttentionTime, ProductTime
from autopar.compiler.profile.messages import MessageTime
from autopar.cost_models.compute import gemm_seconds
from autopar.cost_models.hardware import GemmCurve, Gpu, load_gpu
from autopar.cost_models.work import Gemm

SHAPES = [(16, 16, 16), (64, 512, 512), (512, 64, 512), (512, 512, 16), (1024, 128, 128), (512, 512, 512), (8, 512, 64)]
LARGE = [(256, 256, 256), (1024, 1024, 1024), (4096, 4096, 4096), (8192, 1024, 4096), (128, 4096, 4096)]


def _times(gpu: Gpu, dtype: str, shapes: list[tuple[int, int, int]]) -> list[ProductTime]:
    return [ProductTime(m=m, n=n, k=k, seconds=gemm_seconds(Gemm(m, n, k), gpu, dtype=dtype)) for m, n, k in shapes]


def test_products_without_tiles() -> None:
    curve = GemmCurve(
        rate_fraction=1.0, start_seconds=4e-6, k_overhead=12.0, tile_penalty=0.0, m_overhead=3.0, n_overhead=6.0
    )
    gpu = replace(load_gpu("cpu-local"), gemm=curve, peak_flops_per_second={"float32": 7e10}, sustained_fraction=1.0)
    times = _times(gpu, "float32", SHAPES)
    peak, found = fit_products(gpu, times, "float32", start_seconds=4e-6, tiled=False)
    fitted = replace(gpu, gemm=found, peak_flops_per_second={"float32": peak})
    for time in times:
        again = gemm_seconds(Gemm(time.m, time.n, time.k), fitted, dtype="float32")
        assert again == pytest.approx(time.seconds, rel=0.02)
    assert peak == pytest.approx(7e10, rel=0.05)


def test_products_in_tiles() -> None:
    gpu = load_gpu("h100-sxm")
    start = gpu.gemm.start_seconds
    times = _times(replace(gpu, sustained_fraction=1.0), "bfloat16", LARGE)
    peak, found = fit_products(replace(gpu, sustained_fraction=1.0), times, "bfloat16", start_seconds=start, tiled=True)
    fitted = replace(
        gpu, gemm=found, sustained_fraction=1.0, peak_flops_per_second={**gpu.peak_flops_per_second, "bfloat16": peak}
    )
    for time in times:
        again = gemm_seconds(Gemm(time.m, time.n, time.k), fitted, dtype="bfloat16")
        assert again == pytest.approx(time.seconds, rel=0.1)


def test_rate_of_another_dtype() -> None:
    gpu = load_gpu("h100-sxm")
    assert fit_rate(gpu, _times(gpu, "float64", LARGE), "float64", "float64") == pytest.approx(
        gpu.rate("float64"), rel=0.02
    )


def test_attention() -> None:
    times = []
    for keys in (64, 256, 1024):
        for is_backward, factor in ((False, 1.0), (True, 0.8)):
            seconds = 1e9 * (1 + 100 / keys) / (1e12 * 0.5 * factor)
            times.append(AttentionTime(keys=keys, flops=10**9, seconds=seconds, is_backward=is_backward))
    curve = fit_attention(times, 1e12, forward_seconds=0.0, backward_seconds=0.0)
    assert curve.peak_fraction == pytest.approx(0.5, rel=0.05)
    assert curve.short_keys == pytest.approx(100, rel=0.1)
    assert curve.backward_fraction == pytest.approx(0.8, rel=0.05)


def test_link() -> None:
    times = [
        MessageTime(op=op, ranks=ranks, num_bytes=size, seconds=1e-5 + 2e-6 * ranks + volume * size / 1e9)
        for ranks in (2, 4)
        for size in (1 << 10, 1 << 16, 1 << 20, 1 << 24)
        for op, volume in (("all_reduce", 2 * (ranks - 1) / ranks), ("all_gather", (ranks - 1) / ranks))
    ]
    times += [MessageTime(op="send", ranks=2, num_bytes=size, seconds=3e-6 + size / 2e9) for size in (1 << 10, 1 << 24)]
    link = fit_link(times)
    assert link.bytes_per_second == pytest.approx(1e9, rel=0.05)
    assert link.send_bytes_per_second == pytest.approx(2e9, rel=0.05)
    assert link.latency_seconds + 2 * link.latency_per_rank_seconds == pytest.approx(1.4e-5, rel=0.1)


def test_descend_finds_a_minimum() -> None:
    found = descend(lambda x: (x[0] - 3) ** 2 + (x[1] - 0.01) ** 2, (1.0, 1.0))
    assert found == pytest.approx((3.0, 0.01), rel=1e-2)


def test_a_larger_message_is_never_quicker() -> None:
    assert rising((3.0, 2.0, 5.0), floor=1.0) == (3.0, 3.0, 5.0)
    assert rising((-1.0, 0.5), floor=0.1) == (0.1, 0.5)
