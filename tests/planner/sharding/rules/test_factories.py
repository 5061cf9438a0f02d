"""Tensors made from nothing: whole, or split like the tensor they follow."""

from __future__ import annotations

import pytest
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randn

CASES = (
    case("aten.zeros_like.default", randn(4, 8), labels=("d0", "d1")),
    case("aten.ones_like.default", randn(4, 8), labels=("d0", "d1")),
    case("aten.full_like.default", randn(4, 8), 3.0, labels=("d0", "d1")),
    case("aten.new_zeros.default", randn(4, 8), (8, 4, 4), labels=("d0", "d1", "d2")),
    case("aten.new_zeros.default", randn(4, 8), (4,), labels=("d0",)),
    case("aten.new_full.default", randn(4, 8), (8,), 2.0, labels=("d0",)),
    case("aten.arange.default", 8),
    case("aten.full.default", (4, 8), 1.0),
)


@pytest.mark.gloo
def test_factories_are_exact_on_every_option() -> None:
    assert check(CASES) > 50


def test_positions_are_never_split() -> None:
    node, operands = node_of(case("aten.arange.start", 2, 8))
    assert [o.label for o in options_of(node, operands)] == ["none"]
    assert rule_of(node.op).work(node, operands, node.outputs).forward.bytes == node.output.num_bytes
