"""Batch norm on every option: statistics of the whole batch, running statistics as on one device."""

from __future__ import annotations

import pytest
import torch
from autopar.planner.capture.graph import Symbol, TensorType
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randn

OP = "aten.batch_norm.default"
TRAINING = Symbol("training", "")
WEIGHT, BIAS, MEAN, VARIANCE = randn(8), randn(8, seed=1), randn(8, seed=2), randn(8, seed=3).abs() + 0.5
REST = (0.1, 1e-5, True)
X = randn(4, 8, 4, 4) * 2.0 + 5.0
CASES = (
    case(OP, X, WEIGHT, BIAS, MEAN, VARIANCE, TRAINING, *REST, no_grad=(3, 4), labels=("d0", "d1", "d2", "d3")),
    case(OP, X, WEIGHT, BIAS, MEAN, VARIANCE, True, *REST, no_grad=(3, 4), labels=("d0", "d1", "d2", "d3")),
    case(OP, X, WEIGHT, BIAS, MEAN, VARIANCE, False, *REST, no_grad=(3, 4), labels=("d0", "d1", "d2", "d3")),
    case(OP, randn(8, 8), WEIGHT, BIAS, MEAN, VARIANCE, True, *REST, no_grad=(3, 4), labels=("d0", "d1")),
    case(OP, X, None, None, None, None, True, *REST, labels=("d0", "d1", "d2", "d3")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_batch_norm_is_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_only_statistics_of_the_batch_communicate() -> None:
    node, operands = node_of(CASES[0])
    assert {o.label: o.runs_collectives for o in options_of(node, operands)} == {
        "none": False, "grad": False, "d0": True, "d1": False, "d2": True, "d3": True,
    }  # fmt: skip
    frozen, operands = node_of(CASES[2])
    assert not any(o.runs_collectives for o in options_of(frozen, operands))
    local = [TensorType(shape=(2, 8, 4, 4), dtype="float32", requires_grad=True), *operands[1:]]
    uses = rule_of(OP).collectives(node, "d0", "dp", 4, local, local[:1])
    assert [(u.op, u.num_bytes, u.phase) for u in uses] == [
        ("all_gather", 4 * 2 * 8 * 4, "forward"),
        ("all_reduce", 2 * 8 * 4, "backward"),
    ]
    assert rule_of(OP).collectives(frozen, "d0", "dp", 4, local, local[:1]) == ()


def test_running_statistics_follow_the_channels() -> None:
    node, operands = node_of(CASES[0])
    (channels,) = (o for o in options_of(node, operands) if o.label == "d1")
    assert [str(pair) for pair in channels.operands] == ["S(1)", "S(0)", "S(0)", "S(0)", "S(0)"]
    assert torch.equal(MEAN, randn(8, seed=2))
