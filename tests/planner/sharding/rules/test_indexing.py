"""Lookups and writes by index on every option."""

from __future__ import annotations

import pytest
from autopar.planner.sharding.rules import rule_of
from harness import case, check, node_of, randint, randn

x = randn(4, 8, 4)

CASES = (
    case("aten.gather.default", x, 1, randint(8, 4, 4, 4), labels=("d0", "d1", "d2")),
    case("aten.gather.default", x, 1, randint(8, 2, 8, 4), labels=("d1", "d2")),
    case("aten.scatter.src", x, 1, randint(1, 4, 1, 4), randn(4, 1, 4), labels=("d0", "d2")),
    case("aten.scatter.value", x, 1, randint(8, 4, 3, 4), 2.0, labels=("d0", "d2")),
    case("aten.scatter_add.default", x, 1, randint(8, 4, 16, 4), randn(4, 16, 4), labels=("d0", "d2")),
    case("aten.index_select.default", x, 1, randint(8, 4), labels=("d0", "d1", "d2")),
    case("aten.index.Tensor", x, (None, randint(8, 4)), labels=("d0", "d1", "d2")),
    case("aten.index.Tensor", x, (randint(4, 4, 8),), labels=("d0", "d1", "d2", "d3")),
    case("aten.index.Tensor", x, (randint(4, 4), randint(8, 4)), labels=("d0", "d1")),
    case("aten.index.Tensor", x, (randint(4, 4, 1), None, randint(4, 8)), labels=("d0", "d1", "d2")),
    case("aten.one_hot.default", randint(8, 4, 8), 8, labels=("d0", "d1")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_lookups_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_an_index_by_mask_and_a_one_hot_of_unknown_width_are_not_split() -> None:
    mask = randint(2, 4).bool()
    node, operands = node_of(case("aten.index.Tensor", x, (mask,)))
    assert rule_of(node.op).options(node, operands) == ()
    node, operands = node_of(case("aten.one_hot.default", randint(8, 4)))
    assert rule_of(node.op).options(node, operands) == ()
