"""Layer, RMS and group norm on every option, statistics over split dims included."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import TensorType
from autopar.planner.sharding.rules import rule_of
from harness import case, check, node_of, randn

LAYER, RMS, GROUP = "aten.layer_norm.default", "aten.rms_norm.default", "aten.group_norm.default"
X, IMAGE = randn(4, 4, 8) + 3.0, randn(4, 8, 4, 4) - 2.0
CASES = (
    case(LAYER, X, (8,), randn(8), randn(8, seed=1), labels=("d0", "d1", "d2")),
    case(LAYER, X, (4, 8), randn(4, 8), randn(4, 8, seed=1), 1e-3, labels=("d0", "d1", "d2")),
    case(LAYER, X, (8,), labels=("d0", "d1", "d2")),
    case(LAYER, X, (8,), randn(8), labels=("d0", "d1", "d2")),
    case(RMS, X, (8,), randn(8), 1e-5, labels=("d0", "d1", "d2")),
    case(RMS, X, (8,), randn(8), labels=("d0", "d1", "d2")),
    case(RMS, X, (4, 8), labels=("d0", "d1", "d2")),
    case(GROUP, IMAGE, 4, randn(8), randn(8, seed=1), labels=("d0", "g", "d2", "d3")),
    case(GROUP, IMAGE, 1, randn(8), randn(8, seed=1), labels=("d0", "d2", "d3")),
    case(GROUP, IMAGE, 4, labels=("d0", "g", "d2", "d3")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_norms_are_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_statistics_are_declared() -> None:
    node, operands = node_of(CASES[0])
    local = [TensorType(shape=(4, 4, 4), dtype="bfloat16", requires_grad=True), *operands[1:]]
    rule = rule_of(LAYER)
    assert [(u.op, u.num_bytes, u.phase) for u in rule.collectives(node, "d2", "tp", 2, local, local[:1])] == [
        ("all_gather", 2 * 2 * 16 * 4, "forward"),
        ("all_reduce", 2 * 16 * 4, "backward"),
    ]
    assert rule.collectives(node, "d0", "tp", 2, local, local[:1]) == ()
    node, operands = node_of(CASES[4])
    assert [(u.op, u.num_bytes) for u in rule_of(RMS).collectives(node, "d2", "tp", 2, local, local[:1])] == [
        ("all_reduce", 16 * 4),
        ("all_reduce", 16 * 4),
    ]
