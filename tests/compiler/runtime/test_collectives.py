"""Every change of placement against its pair: the global value and the global gradient do not change."""

from __future__ import annotations

import pytest
import torch
from autopar.compiler import runtime
from autopar.planner.sharding.placement import Pair, parse_pair
from autopar.planner.sharding.redistribute import conversion
from torch.distributed.device_mesh import init_device_mesh

SHAPE = (24, 6, 24)
PAIRS = ("R", "R/P", "P/R", "S(0)", "S(2)", "S(0;3)", "S(2;2)")


def _shard(x: torch.Tensor, pair: Pair, size: int, rank: int) -> torch.Tensor:
    parts = x.unflatten(pair.dim, (pair.groups, size, -1)).select(pair.dim + 1, rank)
    return parts.flatten(pair.dim, pair.dim + 1)


def _lay_out(x: torch.Tensor, kind: str, pair: Pair, size: int, rank: int) -> torch.Tensor:
    """What `rank` holds of x where it is split, whole, or a random sum ("P")."""
    if kind == "S":
        return _shard(x, pair, size, rank).clone()
    if kind == "R":
        return x.clone()
    noise = torch.randn(size - 1, *x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7))
    return noise[rank] if rank < size - 1 else x - noise.sum(0)


def _forward_kind(pair: Pair) -> str:
    return "S" if pair.is_split else pair.kind[0]


def _gradient_kind(pair: Pair) -> str:
    return "S" if pair.is_split else pair.kind[-1]


def _matches(local: torch.Tensor, whole: torch.Tensor, kind: str, pair: Pair, mesh) -> bool:
    size, rank = mesh.size(), mesh.get_local_rank()
    if kind == "P":
        local = local.clone()
        torch.distributed.all_reduce(local, group=mesh.get_group())
        kind = "R"
    want = _shard(whole, pair, size, rank) if kind == "S" else whole
    return local.shape == want.shape and bool(torch.allclose(local, want, rtol=1e-12, atol=1e-12))


def _convert(x: torch.Tensor, source: Pair, target: Pair, axis) -> torch.Tensor:
    change = conversion(source, target)
    assert change is not None
    function = getattr(runtime, change.function)
    groups = [pair.groups for pair in (source, target) if pair.is_split]
    dims = [pair.dim for pair in (source, target) if pair.is_split]
    return function(x, *dims, axis, *groups)


def _check_all(mesh) -> list[str]:
    torch.manual_seed(0)
    whole = torch.randn(SHAPE, dtype=torch.float64)
    gradient = torch.randn(SHAPE, dtype=torch.float64)
    size, rank, wrong = mesh.size(), mesh.get_local_rank(), []
    for source_text in PAIRS:
        for target_text in PAIRS:
            source, target = parse_pair(source_text), parse_pair(target_text)
            if source == target or (source_text, target_text) == ("R/P", "P/R"):
                continue
            x = _lay_out(whole, _forward_kind(source), source, size, rank).requires_grad_()
            before = x.detach().clone()
            y = _convert(x, source, target, mesh)
            y.backward(_lay_out(gradient, _gradient_kind(target), target, size, rank))
            ok = _matches(y.detach(), whole, _forward_kind(target), target, mesh)
            ok &= _matches(x.grad, gradient, _gradient_kind(source), source, mesh)
            if not (ok and y.is_contiguous() and torch.equal(before, x.detach())):
                wrong.append(f"{source_text} -> {target_text}")
    return wrong


def _check_integers(mesh) -> list[str]:
    wrong = []
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        whole = (torch.arange(48).reshape(8, 6) % 5 > 2).to(dtype)
        part = runtime.take_shard(whole, 0, mesh)
        moved = runtime.all_to_all(part, 0, 0, mesh, 1, 2)
        if not torch.equal(runtime.all_gather(part, 0, mesh), whole):
            wrong.append(f"gather {dtype}")
        if not torch.equal(moved, _shard(whole, parse_pair("S(0;2)"), mesh.size(), mesh.get_local_rank())):
            wrong.append(f"all_to_all {dtype}")
        if part.requires_grad or moved.requires_grad:
            wrong.append(f"gradient {dtype}")
    return wrong


def _on_two_and_four(mesh) -> list[str]:
    four = init_device_mesh("cpu", (4,))
    return _check_all(mesh["tp"]) + _check_all(four) + _check_integers(mesh["tp"])


@pytest.mark.gloo
def test_every_change_of_pair_keeps_value_and_gradient(on_ranks) -> None:
    assert on_ranks(_on_two_and_four, dp=2, tp=2) == [[]] * 4


def _added_gradients(mesh) -> list[list[float]]:
    from torch.distributed.tensor import DTensor, Replicate

    parameters = [
        torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh["tp"], [Replicate()], run_check=False))
        for _ in range(2)
    ]
    one, other = parameters
    for _ in range(2):
        total = runtime.own_gradient(one.to_local()) + runtime.own_gradient(other.to_local())
        (total * torch.tensor([1.0, 3.0])).sum().backward()
    return [parameter.grad.to_local().tolist() for parameter in parameters]


@pytest.mark.gloo
def test_gradients_that_arrive_as_one_tensor_add_up_apart(on_ranks) -> None:
    # Without own_gradient both would be [3, 9]: the second is added to the same memory twice.
    assert on_ranks(_added_gradients, tp=2) == [[[2.0, 6.0], [2.0, 6.0]]] * 2
