"""Host costs of a profiled machine reach the strategies whose emitted code has them, and no others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar.cost_models.compute import device_seconds
from autopar.cost_models.hardware import Curve, Gpu, HostCosts, UpdateCosts, load_gpu
from autopar.cost_models.optimizer import optimizer_seconds
from autopar.cost_models.work import Gemm, Pass
from autopar.planner.search.held_parameters import HeldParameter
from autopar.planner.search.holdings import Holdings
from autopar.planner.search.host_seconds import fsdp_hooks, holds_dtensors
from autopar.planner.sharding.mesh import Mesh

CPU = load_gpu("cpu-local")


def _held(fqn: str, group: str) -> HeldParameter:
    return HeldParameter(
        fqn=fqn, shape=(4, 4), dtype="float32", trainable=True, partial=frozenset(), group=group
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "zero", "wanted"),
    [
        (Mesh(dp=2), 0, False),
        (Mesh(dp=2), 1, True),
        (Mesh(dp=2), 3, True),
        (Mesh(tp=2), 0, True),
        (Mesh(ep=2), 0, True),
        (Mesh(pp=2), 0, False),
    ],
)
def test_dtensors(mesh: Mesh, zero: int, wanted: bool) -> None:
    assert holds_dtensors(mesh, zero) is wanted


def test_fsdp_hooks_count_groups_and_parameters() -> None:
    host = HostCosts(
        fsdp_group_forward_seconds=1.0,
        fsdp_parameter_forward_seconds=0.1,
        fsdp_group_backward_seconds=2.0,
        fsdp_parameter_backward_seconds=0.2,
    )
    held = Holdings.of([_held("a", "h.0"), _held("b", "h.0"), _held("c", "")])
    assert fsdp_hooks(held, replace(CPU, host=host)) == pytest.approx((2.3, 4.6))
    assert fsdp_hooks(held, CPU) == (0.0, 0.0)


def test_updates_as_measured() -> None:
    costs = UpdateCosts(tensor_seconds=1e-5, sharded_tensor_seconds=1e-3, bytes_per_second=1e9)
    gpu = replace(CPU, updates={"adamw": costs, "clip": costs})
    plain = optimizer_seconds(10**6, gpu, optimizer="adamw", num_tensors=10)
    sharded = optimizer_seconds(10**6, gpu, optimizer="adamw", num_tensors=10, sharded=True)
    assert plain == pytest.approx(2 * (1e-4 + 1e-3))
    assert sharded == pytest.approx(2 * (1e-2 + 1e-3))
    # SGD was not measured there: its traffic is priced.
    assert optimizer_seconds(10**6, gpu, optimizer="sgd") == optimizer_seconds(10**6, CPU, optimizer="sgd")


def _streaming(gpu: Gpu) -> Gpu:
    ahead = Curve(num_bytes=(1e4, 1e6, 1e8), seconds=(1e-7, 1e-4, 2e-2))
    return replace(gpu, streaming=ahead, streaming_backward=ahead)


def test_streaming_takes_the_curve_by_kernel() -> None:
    gpu = _streaming(replace(CPU, kernel_seconds=0.0, kernel_backward_seconds=0.0))
    one = device_seconds(Pass(bytes=10**6, kernels=1), gpu, dtype="float32")
    two = device_seconds(Pass(bytes=2 * 10**6, kernels=2), gpu, dtype="float32")
    assert one == pytest.approx(1e-4)
    assert two == pytest.approx(2e-4)
    # Beyond the last size at the slope of the last stretch.
    large = device_seconds(Pass(bytes=2 * 10**8, kernels=1), gpu, dtype="float32")
    assert large == pytest.approx(2e-2 + 1e8 * (2e-2 - 1e-4) / (1e8 - 1e6))


def test_a_bound_is_below_every_split() -> None:
    gpu = _streaming(CPU)
    best = gpu.at_best_rates()
    whole = device_seconds(Pass(bytes=10**8, kernels=1), best, dtype="float32") - CPU.kernel_seconds
    for parts in (1, 10, 100, 1000, 10000):
        part = device_seconds(Pass(bytes=10**8 // parts, kernels=1), gpu, dtype="float32")
        assert whole <= parts * part


def test_transcendentals_cost_where_they_were_measured() -> None:
    work = Pass(bytes=4000, kernels=1, transcendentals=10**6)
    base = device_seconds(work, CPU, dtype="float32")
    slow = device_seconds(work, replace(CPU, transcendental_seconds=1e-8), dtype="float32")
    assert slow == pytest.approx(CPU.kernel_seconds + 1e-2)
    assert base < slow


def test_products_without_tiles_waste_nothing() -> None:
    curve = replace(CPU.gemm, m_overhead=0.0, n_overhead=0.0, k_overhead=0.0, start_seconds=0.0, rate_fraction=1.0)
    gpu = replace(CPU, gemm=curve, sustained_fraction=1.0, kernel_seconds=0.0, hbm_bytes_per_second=1e15)
    seconds = device_seconds(Pass(gemms=(Gemm(33, 65, 17),), kernels=1), gpu, dtype="float32")
    assert seconds == pytest.approx(2 * 33 * 65 * 17 / gpu.rate("float32"))


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [((1.0,), (1.0,)), ((2.0, 1.0), (1.0, 2.0)), ((1.0, 2.0), (0.0, 1.0)), ((1.0, 2.0), (1.0,))],
)
def test_no_curve(num_bytes: tuple[float, ...], seconds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Curve(num_bytes=num_bytes, seconds=seconds)
