import subprocess
import sys
from dataclasses import replace

import pytest
from autopar.cost_models.compute import attention_seconds, device_seconds, gemm_seconds, pass_seconds, work_seconds
from autopar.cost_models.errors import HardwareError
from autopar.cost_models.hardware import cluster_names, load_cluster, load_gpu
from autopar.cost_models.stacks import load_stack
from autopar.cost_models.work import Gemm, Pass, Work
from hypothesis import given
from hypothesis import strategies as st

H100 = load_gpu("h100-sxm")
A100 = load_gpu("a100-80g-sxm")
sizes = st.integers(1, 20000)
passes = st.builds(
    Pass,
    gemms=st.lists(st.builds(Gemm, sizes, sizes, sizes, st.integers(1, 64)), max_size=2).map(tuple),
    flops=st.integers(0, 10**10),
    bytes=st.integers(0, 10**10),
    attention_flops=st.integers(0, 10**12),
    kernels=st.integers(0, 20),
)


@given(p=passes, extra=passes, backward=st.booleans())
def test_costs_are_positive_and_grow(p: Pass, extra: Pass, backward: bool) -> None:
    alone = pass_seconds(p, H100, dtype="bfloat16", is_backward=backward)
    both = pass_seconds(p + extra, H100, dtype="bfloat16", is_backward=backward)
    assert 0 <= alone <= both * (1 + 1e-9)


@given(passes, st.integers(0, 10**10))
def test_more_bytes_are_never_faster(p: Pass, extra: int) -> None:
    more = Pass(gemms=p.gemms, flops=p.flops, bytes=p.bytes + extra, attention_flops=p.attention_flops,
                kernels=p.kernels, attention_bytes=p.attention_bytes)  # fmt: skip
    assert device_seconds(p, A100, dtype="float16") <= device_seconds(more, A100, dtype="float16") * (1 + 1e-9)


@given(sizes, sizes, sizes, st.integers(1, 16))
def test_no_product_beats_the_peak(m: int, n: int, k: int, batch: int) -> None:
    gemm = Gemm(m, n, k, batch)
    for gpu in (H100, A100):
        assert gemm.flops / gemm_seconds(gemm, gpu, dtype="bfloat16") < gpu.rate("bfloat16")


def test_nothing_costs_nothing() -> None:
    assert work_seconds(Work(), H100) == (0.0, 0.0)


def test_large_products_run_near_the_sustained_rate_and_small_ones_far_below() -> None:
    large, small = Gemm(8192, 8192, 8192), Gemm(256, 256, 256)
    sustained = H100.rate("bfloat16") * H100.gemm.rate_fraction * H100.sustained_fraction
    assert large.flops / gemm_seconds(large, H100, dtype="bfloat16") > 0.9 * sustained
    assert small.flops / gemm_seconds(small, H100, dtype="bfloat16") < 0.1 * sustained


def test_a_wave_that_is_hardly_filled_costs_a_whole_one() -> None:
    full = gemm_seconds(Gemm(256 * 132, 128, 8192), H100, dtype="bfloat16")
    over = gemm_seconds(Gemm(256 * 133, 128, 8192), H100, dtype="bfloat16")
    assert over > 1.2 * full


def test_misaligned_products_are_slower() -> None:
    aligned = gemm_seconds(Gemm(2048, 2048, 112, 32), A100, dtype="float16")
    odd = gemm_seconds(Gemm(2048, 2048, 108, 32), A100, dtype="float16")
    assert odd > 5 * aligned
    assert gemm_seconds(Gemm(2048, 2048, 108, 32), A100, dtype="float32") < 1.1 * gemm_seconds(
        Gemm(2048, 2048, 112, 32), A100, dtype="float32"
    )


def test_dtypes_and_stacks_choose_the_rate() -> None:
    gemm = Gemm(4096, 4096, 4096)
    times = {
        dtype: gemm_seconds(gemm, H100, dtype=dtype) for dtype in ("float64", "float32", "bfloat16", "float8_e5m2")
    }
    assert times["float64"] >= times["float32"] > times["bfloat16"] > times["float8_e5m2"]
    assert load_stack("eager").float32_matmul == "ieee"
    with pytest.raises(HardwareError, match="no float8"):
        gemm_seconds(gemm, A100, dtype="float8_e4m3fn")


def test_short_attention_is_less_efficient() -> None:
    def rate(keys: int) -> float:
        rows, width = 2**20 // keys * 32, 128
        flops, num_bytes = 2 * rows * keys * keys * width, 8 * rows * keys * width
        return flops / attention_seconds(flops, num_bytes, H100, dtype="bfloat16")

    rates = [rate(keys) for keys in (512, 1024, 4096, 65536)]
    assert rates == sorted(rates)
    peak = H100.rate("bfloat16") * H100.sustained_fraction * H100.attention.peak_fraction
    assert rates[0] == pytest.approx(peak / (1 + H100.attention.short_keys / 512))
    assert rates[-1] > 0.97 * peak


def test_attention_of_a_unit_costs_what_its_parts_cost() -> None:
    attention = Pass(attention_flops=10**12, bytes=10**9, kernels=1)
    other = Pass(bytes=10**9, flops=10**6, kernels=4)
    parts = [device_seconds(p, H100, dtype="bfloat16") for p in (attention, other)]
    assert device_seconds(attention + other, H100, dtype="bfloat16") == pytest.approx(sum(parts))


def test_the_host_limits_small_kernels_once_for_a_whole_unit() -> None:
    small, large = Pass(kernels=10, bytes=1000), Pass(kernels=1, bytes=10**9)
    assert pass_seconds(small, H100, dtype="float32") == pytest.approx(10 * H100.launch_seconds)
    together = pass_seconds(small + large, H100, dtype="float32")
    apart = pass_seconds(small, H100, dtype="float32") + pass_seconds(large, H100, dtype="float32")
    assert together < apart
    assert together >= pass_seconds(large, H100, dtype="float32")


def test_compiled_is_faster_on_pointwise_and_alike_on_products() -> None:
    compiled = load_stack("compiled")
    pointwise = Pass(bytes=10**9, kernels=10)
    assert pass_seconds(pointwise, H100, dtype="bfloat16", stack=compiled) < 0.6 * pass_seconds(
        pointwise, H100, dtype="bfloat16"
    )
    product = Pass(gemms=(Gemm(8192, 8192, 8192),), bytes=3 * 2 * 8192**2, kernels=1)
    assert pass_seconds(product, H100, dtype="bfloat16", stack=compiled) == pass_seconds(
        product, H100, dtype="bfloat16"
    )


@pytest.mark.parametrize("name", cluster_names())
def test_every_device_prices_every_dtype_it_has(name: str) -> None:
    gpu = load_cluster(name).gpu
    for dtype in ("float64", "float32", "int64", "float16"):
        forward, backward = work_seconds(
            Work(forward=Pass(gemms=(Gemm(64, 64, 64),)), backward=Pass(bytes=8), dtype=dtype), gpu
        )
        assert forward > 0
        assert backward > 0


def test_the_cost_models_import_no_torch() -> None:
    code = (
        "import sys, autopar.cost_models.compute, autopar.cost_models.communication, autopar.cost_models.memory, "
        "autopar.cost_models.timeline, autopar.planner.schedules; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pulp')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("name", "fraction"), [("h100-sxm", 0.8), ("a100-80g-sxm", 0.7)])
def test_a_device_says_how_much_slower_the_first_generation_is(name: str, fraction: float) -> None:
    gpu = load_gpu(name)
    second, first = (
        attention_seconds(
            10**12, 10**9, gpu, dtype="bfloat16", stack=replace(load_stack("eager"), attention=generation)
        )
        for generation in ("flash", "flash 1")
    )
    assert second / first == pytest.approx(fraction)
