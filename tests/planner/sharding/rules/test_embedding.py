"""Embedding: indices and features split in einsum form, rows of the table in a body."""

from __future__ import annotations

import pytest
from autopar.planner.errors import CannotLower
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randint, randn

TABLE, IDS = randn(8, 4), randint(8, 4, 8)


@pytest.mark.gloo
def test_embedding_is_exact_on_every_option() -> None:
    cases = (
        case("aten.embedding.default", TABLE, IDS, labels=("d0", "d1", "f", "v")),
        case("aten.embedding.default", TABLE, IDS, 3, labels=("d0", "d1", "f", "v")),
        case("aten.embedding.default", TABLE, IDS, -1, True, labels=("f",)),
    )
    assert check(cases) > 50


def test_rows_are_split_over_one_axis_only() -> None:
    node, operands = node_of(case("aten.embedding.default", TABLE, IDS))
    options = {o.label: o for o in options_of(node, operands, frozenset((2,)))}
    assert options["v"].one_axis
    assert "v;2" not in options
    with pytest.raises(CannotLower, match="one axis only"):
        rule_of(node.op).localise(node, {"dp": "v", "tp": "v"}, node.outputs, {"dp": 2, "tp": 2})


def test_a_sparse_gradient_is_not_split() -> None:
    node, operands = node_of(case("aten.embedding.default", TABLE, IDS, -1, False, True))
    assert rule_of(node.op).options(node, operands) == ()
