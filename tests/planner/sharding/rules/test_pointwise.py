"""Elementwise operations on every option: broadcasting, partial sums through linear ones, grouped splits."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import Symbol
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randint, randn

x, y, bias = randn(4, 8), randn(4, 8, seed=1), randn(8)
mask = randint(2, 4, 8).bool()
DIMS = ("d0", "d1")
LINEAR = (*DIMS, "partial")

CASES = (
    case("aten.add.Tensor", x, y, labels=LINEAR),
    case("aten.add.Tensor", x, bias, labels=LINEAR, alpha=2),
    case("aten.add.Tensor", x, 1.5, labels=DIMS),
    case("aten.add.Tensor", randn(4, 1, 8), randn(4, 8), labels=("d0", "d1", "d2", "partial")),
    case("aten.sub.Tensor", x, bias, labels=LINEAR),
    case("aten.neg.default", x, labels=LINEAR),
    case("aten.mul.Tensor", x, bias, labels=(*DIMS, "partial:0", "partial:1")),
    case("aten.mul.Tensor", x, 0.5, labels=LINEAR),
    case("aten.mul.Tensor", x, randint(2, 4, 8), labels=(*DIMS, "partial:0", "partial:1")),
    case("aten.div.Tensor", x, y, labels=(*DIMS, "partial:0")),
    case("aten.div.Tensor", x, 8.0, labels=LINEAR),
    case("aten.where.self", mask, x, bias, labels=LINEAR),
    case("aten.where.ScalarOther", mask, x, 0.0, labels=LINEAR),
    case("aten.where.ScalarOther", mask, x, 1.0, labels=DIMS),
    case("aten.masked_fill.Scalar", x, mask, 0, labels=LINEAR),
    case("aten.masked_fill.Scalar", x, mask, -1e9, labels=DIMS),
    case("aten._to_copy.default", x, labels=LINEAR, dtype=Symbol("dtype", "float64")),
    case("aten._to_copy.default", mask, labels=DIMS, dtype=Symbol("dtype", "float64")),
    case("aten._to_copy.default", x, labels=DIMS, dtype=Symbol("dtype", "int64"), no_grad=(0,)),
    case("aten.clone.default", x, labels=LINEAR),
    case("aten.gelu.default", x, labels=DIMS, approximate="tanh"),
    case("aten.relu.default", x, labels=DIMS),
    case("aten.silu.default", x, labels=DIMS),
    case("aten.pow.Tensor_Scalar", x, 3, labels=DIMS),
    case("aten.rsqrt.default", x.abs() + 1, labels=DIMS),
    case("aten.maximum.default", x, bias, labels=DIMS),
    case("aten.ne.Scalar", randint(3, 4, 8), 1, labels=DIMS),
    case("aten.hardswish.default", x, labels=DIMS),
    case("aten.log_sigmoid.default", x, labels=DIMS),
    case("aten.softplus.default", x, labels=DIMS),
    case("aten.prelu.default", randn(4, 8, 4), randn(8), labels=("d0", "d1", "d2")),
    case("aten.prelu.default", x, randn(1), labels=DIMS),
    case("aten.logical_and.default", mask, mask, labels=DIMS),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_elementwise_operations_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_a_split_with_groups_passes_through() -> None:
    node, operands = node_of(case("aten.gelu.default", randn(4, 12)))
    labels = {o.label: o for o in options_of(node, operands, frozenset((3, 5)))}
    assert str(labels["d1;3"].operands[0]) == "S(1;3)"
    assert str(labels["d1;3"].outputs[0]) == "S(1;3)"
    assert labels["d1;3"].extent == 4
    assert "d1;5" not in labels


def test_random_and_in_place_operations_have_no_elementwise_rule() -> None:
    assert rule_of("aten.bernoulli_.float") is None
    assert rule_of("aten.relu_.default") is None
    assert rule_of("aten.no_such_op.default") is None
