"""Matrix products on every option against the unsharded product; work and saved tensors."""

from __future__ import annotations

import pytest
import torch
from autopar.cost_models.work import Gemm
from autopar.planner.capture.graph import TensorType
from autopar.planner.sharding.rules import rule_of
from harness import case, check, node_of, randn

CASES = (
    case("aten.linear.default", randn(4, 8, 8), randn(16, 8), labels=("d0", "d1", "n", "k")),
    case("aten.linear.default", randn(8), randn(8, 8), labels=("n", "k")),
    case("aten.mm.default", randn(8, 4), randn(4, 8), labels=("m", "k", "n")),
    case("aten.bmm.default", randn(4, 8, 4), randn(4, 4, 8), labels=("d0", "m", "k", "n")),
    case("aten.matmul.default", randn(4, 4, 8, 4), randn(4, 4, 4, 8), labels=("d0", "d1", "m", "k", "n")),
    case("aten.matmul.default", randn(4, 8, 4), randn(4, 8), labels=("d0", "m", "k", "n")),
    case("aten.matmul.default", randn(4, 1, 8, 4), randn(8, 4, 4), labels=("d0", "d1", "m", "k", "n")),
    case("aten.matmul.default", randn(8, 4), randn(4), labels=("m", "k")),
    case("aten.matmul.default", randn(4), randn(4, 8), labels=("k", "n")),
    case("aten.mv.default", randn(8, 4), randn(4), labels=("m", "k")),
    case("aten.dot.default", randn(8), randn(8, seed=1), labels=("k",)),
    case("aten.outer.default", randn(8), randn(4), labels=("m", "n")),
    case("aten.einsum.default", "bthd,bshd->bhts", (randn(4, 4, 4, 4), randn(4, 8, 4, 4)), labels=tuple("bhtsd")),
    case("aten.einsum.default", "ij,jk,kl->il", (randn(4, 4), randn(4, 8), randn(8, 4)), labels=tuple("ijkl")),
    case("aten.einsum.default", "bi,bi->b", (randn(4, 8), randn(1, 8)), labels=("b", "i")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_products_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_an_einsum_with_a_diagonal_or_an_ellipsis_is_not_split() -> None:
    for equation, x in (("ii->i", randn(4, 4)), ("...i->...", randn(4, 4))):
        node, operands = node_of(case("aten.einsum.default", equation, (x,)))
        assert rule_of(node.op).options(node, operands) == ()


def test_work_of_linear_is_one_product_forward_and_two_backward() -> None:
    example = case("aten.linear.default", randn(4, 8, 6), randn(10, 6))
    node, operands = node_of(example)
    work = rule_of(node.op).work(node, operands, node.outputs)
    assert work.forward.gemms == (Gemm(32, 10, 6),)
    assert work.backward.gemms == (Gemm(32, 6, 10), Gemm(6, 10, 32))
    assert work.backward.total_flops == 2 * work.forward.total_flops
    frozen = (TensorType(shape=(4, 8, 6), dtype="float64"), operands[1])
    assert rule_of(node.op).work(node, frozen, node.outputs).backward.gemms == (Gemm(6, 10, 32),)


def test_work_of_a_batched_product_with_a_broadcast_operand_counts_every_multiply_add() -> None:
    node, operands = node_of(case("aten.matmul.default", randn(4, 1, 8, 4), randn(8, 4, 6)))
    flops = rule_of(node.op).work(node, operands, node.outputs).forward.total_flops
    assert flops == 2 * 4 * 8 * 8 * 4 * 6


def test_linear_keeps_both_operands() -> None:
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.untyped_storage().data_ptr()) or t, lambda t: t
    ):
        torch.ops.aten.linear.default(x, w)
    node, _ = node_of(case("aten.linear.default", randn(3, 4), randn(5, 4)))
    operands = (x, w)
    saved = rule_of(node.op).saved(node)
    assert set(kept) == {operands[i].untyped_storage().data_ptr() for i in saved.operands}
