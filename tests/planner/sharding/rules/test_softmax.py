"""Softmax and log-softmax on every option, their own dim included."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import Symbol
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randn

X = randn(4, 4, 8) * 20.0
LABELS = ("d0", "d1", "d2")
CASES = (
    case("aten.softmax.int", X, -1, labels=LABELS),
    case("aten.softmax.int", X, 1, Symbol("dtype", "float64"), labels=LABELS),
    case("aten.log_softmax.int", X, -1, labels=LABELS),
    case("aten._softmax.default", X, 0, False, labels=LABELS),
    case("aten._log_softmax.default", X, 2, False, labels=LABELS),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_softmax_is_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_maxima_and_sums_travel() -> None:
    node, operands = node_of(CASES[0])
    rule = rule_of(node.op)
    uses = rule.collectives(node, "d2", "tp", 2, operands, node.outputs)
    assert [(u.op, u.num_bytes, u.phase) for u in uses] == [
        ("all_reduce", 16 * 8, "forward"), ("all_reduce", 16 * 8, "forward"), ("all_reduce", 16 * 8, "backward"),
    ]  # fmt: skip
    assert rule.collectives(node, "d0", "tp", 2, operands, node.outputs) == ()
    assert [o.label for o in options_of(node, operands) if o.runs_collectives] == ["d2"]
