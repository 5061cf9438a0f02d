"""Draws: where they may be split, and what they draw from there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autopar.planner.sharding.rules import SeedRef, options_of, rule_of
from harness import case, node_of, randn

SIZES = {"dp": 2, "microbatch": 2, "tp": 2}
DRAWS = (
    case("aten.rand.default", [4, 8]),
    case("aten.randint.low", 2, 9, [4, 8]),
    case("aten.bernoulli.default", randn(4, 8).sigmoid()),
    case("aten.exponential.default", randn(4, 8)),
    case("aten.normal.Tensor_float", randn(4, 8), 0.5),
)


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_any_dim_may_be_split_and_nothing_is_a_sum(draw) -> None:
    node, operands = node_of(draw)
    assert {"none", "d0", "d1"} <= {o.label for o in options_of(node, operands)} <= {"none", "grad", "d0", "d1"}


@pytest.mark.parametrize("draw", DRAWS, ids=str)
def test_seeds_differ_over_axes_that_split_and_only_there(draw) -> None:
    node, _ = node_of(draw)

    def seed(**labels: str) -> object:
        return dict(rule_of(node.op).localise(node, labels, node.outputs, SIZES).kwargs)["seed"]

    assert seed(dp="d0", microbatch="d0", tp="d1") == SeedRef(("dp", "tp"))
    assert seed(dp="d0", microbatch="d0", tp="none") == SeedRef(("dp",))
    assert seed(dp="none", microbatch="none", tp="none") == SeedRef((), is_of_step=True)


def test_a_rank_draws_its_own_part_alone() -> None:
    node, _ = node_of(case("aten.rand.default", [4, 8]))
    (whole,) = node.outputs
    part = torch.Size([2, 8])

    call = rule_of(node.op).localise(node, {"dp": "d0"}, (replace(whole, shape=tuple(part)),), {"dp": 2})
    assert call.args[0] == (2, 8)


def test_a_permutation_is_whole() -> None:
    node, operands = node_of(case("aten.randperm.default", 8))
    assert {o.label for o in options_of(node, operands)} == {"none"}
