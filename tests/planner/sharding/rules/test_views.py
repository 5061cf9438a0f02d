"""Views of a whole tensor on every option, groups included; the common factors of two shapes."""

from __future__ import annotations

from math import prod

import pytest
from autopar.planner.sharding.placement import split
from autopar.planner.sharding.rules import options_of, rule_of
from autopar.planner.sharding.rules.views import reshape_factors
from harness import case, check, node_of, randint, randn
from hypothesis import given
from hypothesis import strategies as st

CASES = (
    case("aten.permute.default", randn(4, 8, 4), (2, 0, 1), labels=("d0", "d1", "d2", "partial")),
    case("aten.transpose.int", randn(4, 8), 0, -1, labels=("d0", "d1", "partial")),
    case("aten.t.default", randn(4, 8), labels=("d0", "d1", "partial")),
    case("aten.movedim.int", randn(4, 8, 4), 0, 2, labels=("d0", "d1", "d2", "partial")),
    case("aten.unsqueeze.default", randn(4, 8), 1, labels=("d0", "d2", "partial")),
    case("aten.squeeze.default", randn(4, 1, 8), labels=("d0", "d1", "partial")),
    case("aten.squeeze.dim", randn(4, 8), 0, labels=("d0", "d1", "partial")),
    case("aten.squeeze.dims", randn(4, 1, 8, 1), (1, 3), labels=("d0", "d1", "partial")),
    case("aten.reshape.default", randn(4, 8, 4), (32, 4), labels=("f0", "f1", "f2", "partial")),
    case("aten.reshape.default", randn(4, 32), (4, 8, 4), labels=("f0", "f1", "f2", "partial")),
    case("aten.reshape.default", randn(4, 8, 4, 4), (4, 8, 16), labels=("f0", "f1", "f2", "f3", "partial")),
    case("aten.reshape.default", randn(8, 4), (4, 8), labels=("f0", "f1", "f2", "partial"), groups=(2, 4)),
    case("aten.reshape.default", randn(4, 2, 3), (4, 3, 2), labels=("f0", "partial")),
    case("aten.reshape.default", randn(4, 1, 8), (4, 8, 1), labels=("f0", "f1", "partial")),
    case("aten.expand.default", randn(4, 1, 8), (4, 4, 8), labels=("d0", "d1", "d2", "partial")),
    case("aten.expand.default", randn(8), (4, -1), labels=("d0", "d1", "partial")),
    case("aten.repeat.default", randn(4, 1, 4), (4, 1, 4, 2), labels=("r0", "d1", "r2", "d3", "r3", "partial")),
    case("aten.repeat_interleave.self_int", randn(4, 4), 4, 1, labels=("d0", "d1", "r1", "partial")),
    case("aten.repeat_interleave.self_int", randn(4, 4), 2, labels=("partial",)),
    case("aten.reshape.default", randint(2, 4, 8).bool(), (32,), labels=("f0", "f1")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_views_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_flattening_turns_a_split_of_the_minor_dim_into_one_with_groups() -> None:
    node, operands = node_of(case("aten.reshape.default", randn(6, 8, 4), (48, 4)))
    option = {o.label: o for o in options_of(node, operands)}["f1"]
    assert (option.operands, option.outputs, option.extent) == ((split(1),), (split(0, 6),), 8)


def test_heads_of_a_fused_projection_stay_split_through_the_reshape() -> None:
    node, operands = node_of(case("aten.reshape.default", randn(2, 4, 24), (2, 4, 3, 4, 2)))
    options = {o.label: o for o in options_of(node, operands)}
    assert (options["f3"].operands, options["f3"].outputs) == ((split(2, 3),), (split(3),))


def test_squeeze_of_a_dim_that_becomes_one_locally_is_written_as_a_shape() -> None:
    node, operands = node_of(case("aten.squeeze.default", randn(4, 1, 8)))
    local = rule_of(node.op).localise(node, {"tp": "d0"}, [node.output], {"tp": 4})
    assert local.target == "aten.reshape.default"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.randoms())
def test_factors_multiply_to_both_shapes(shape: list[int], random) -> None:
    target = list(shape)
    random.shuffle(target)
    merged: list[int] = []
    for size in target:
        if merged and random.random() < 0.5:
            merged[-1] *= size
        else:
            merged.append(size)
    factors = reshape_factors(shape, merged)
    assert prod(size for size, _, _ in factors) == prod(shape)
    for pairs, dims in ((1, shape), (2, merged)):
        for size, *places in factors:
            place = places[pairs - 1]
            if place is not None:
                assert dims[place.dim] % (place.groups * size) == 0
