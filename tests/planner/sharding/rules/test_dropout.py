"""Dropout: what draws alike and what does not."""

from __future__ import annotations

from autopar.planner.sharding.rules import SeedRef, options_of, rule_of
from harness import case, node_of, randn

DROPOUT = "aten.dropout.default"


def test_any_dim_may_be_split_and_partial_sums_pass() -> None:
    node, operands = node_of(case(DROPOUT, randn(4, 8), 0.5, True))
    options = {o.label: o for o in options_of(node, operands)}
    assert set(options) == {"none", "grad", "d0", "d1", "partial"}
    assert [str(p) for p in (*options["partial"].operands, *options["partial"].outputs)] == ["P/R", "P/R"]


def test_a_mask_is_not_a_sum() -> None:
    node, operands = node_of(case("aten.native_dropout.default", randn(4, 8), 0.5, True))
    assert {o.label for o in options_of(node, operands)} == {"none", "grad", "d0", "d1"}


def test_seeds_differ_over_axes_that_split_and_only_there() -> None:
    node, _ = node_of(case(DROPOUT, randn(4, 8), 0.5, True))
    sizes = {"dp": 2, "microbatch": 2, "tp": 2}

    def seed(**labels: str) -> object:
        return rule_of(DROPOUT).localise(node, labels, node.outputs, sizes).args[-1]

    assert seed(dp="d0", microbatch="d0", tp="d1") == SeedRef(("dp", "tp"))
    assert seed(dp="d0", microbatch="d0", tp="partial") == SeedRef(("dp",))
    assert seed(dp="none", microbatch="none", tp="grad") == SeedRef((), is_of_step=True)
    channels, _ = node_of(case("aten.feature_dropout.default", randn(4, 8, 2, 2), 0.5, True))
    call = rule_of(channels.op).localise(channels, {"dp": "d0", "tp": "d3"}, channels.outputs, sizes)
    assert call.args[-1] == SeedRef(("dp",))


def test_dropout_that_is_off_is_left_alone() -> None:
    node, _ = node_of(case(DROPOUT, randn(4, 8), 0.5, False))
    assert rule_of(DROPOUT).localise(node, {"tp": "d0"}, node.outputs, {"tp": 2}).target == DROPOUT
