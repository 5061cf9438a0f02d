"""Parts of a dim and joined parts on every option: groups where pieces share a unit, never a cut that is not exact."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import Kind, Node, Ref, Template, TensorType
from autopar.planner.sharding.placement import split
from autopar.planner.sharding.rules import interesting_groups, options_of
from harness import case, check, node_of, randint, randn

CASES = (
    case("aten.split_with_sizes.default", randn(4, 24), (8, 8, 8), 1, labels=("d0", "d1", "partial")),
    case("aten.split_with_sizes.default", randn(4, 32), (16, 8, 8), 1, labels=("d0", "d1", "partial")),
    case("aten.split_with_sizes.default", randn(8, 4), (5, 3), labels=("d1", "partial")),
    case("aten.slice.Tensor", randn(4, 8), labels=("d0", "d1", "partial")),
    case("aten.slice.Tensor", randn(4, 8), 1, 0, 2**63 - 1, labels=("d0", "d1", "partial")),
    case("aten.slice.Tensor", randn(4, 16), 1, 8, 2**63 - 1, labels=("d0", "d1", "partial")),
    case("aten.slice.Tensor", randn(4, 16), 1, 0, -8, labels=("d0", "d1", "partial")),
    case("aten.slice.Tensor", randn(4, 32), 1, -24, -8, labels=("d0", "d1", "partial")),
    case("aten.slice.Tensor", randn(4, 8), 1, 0, -1, labels=("d0", "partial")),
    case("aten.slice.Tensor", randn(4, 8), 1, 0, 8, 2, labels=("d0", "partial")),
    case("aten.narrow.default", randn(4, 8), 1, 2, 3, labels=("d0", "partial")),
    case("aten.select.int", randn(4, 8, 4), 1, -1, labels=("d0", "d1", "partial")),
    case("aten.unbind.int", randn(4, 3, 4), 1, labels=("d0", "d1", "partial")),
    case("aten.cat.default", (randn(4, 8), randn(4, 8, seed=1)), 1, labels=("d0", "d1", "partial")),
    case("aten.cat.default", (randn(4, 8), randn(4, 16)), -1, labels=("d0", "d1", "partial")),
    case("aten.cat.default", (randn(4, 8), randn(3, 8)), labels=("d1", "partial")),
    case("aten.stack.default", (randn(4, 8), randn(4, 8, seed=1)), 1, labels=("d0", "d2", "partial")),
    case("aten.flip.default", randn(4, 8), (1,), labels=("d0", "partial")),
    case("aten.roll.default", randn(4, 8), (2,), (0,), labels=("d1", "partial")),
    case("aten.roll.default", randn(4, 8), (2,), labels=("partial",)),
    case("aten.tril.default", randn(4, 8, 8), labels=("d0", "partial")),
    case("aten.triu.default", randint(2, 4, 8, 8).bool(), 1, labels=("d0",)),
    case("aten.constant_pad_nd.default", randn(4, 8), (1, 2), labels=("d0", "partial")),
    case("aten.constant_pad_nd.default", randn(4, 8), (1, 2), 3.0, labels=("d0",)),
    case("aten.pad.default", randn(4, 4, 8), (1, 2), "reflect", labels=("d0", "d1", "partial")),
    case("aten.glu.default", randn(4, 16), labels=("d0", "d1")),
    case("aten.unfold.default", randn(4, 8), 1, 3, 2, labels=("d0", "partial")),
    case("aten.diagonal.default", randn(4, 8, 8), 0, 1, 2, labels=("d0", "partial")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_parts_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_a_fused_projection_splits_in_every_piece() -> None:
    node, operands = node_of(case("aten.split_with_sizes.default", randn(2, 12), (4, 4, 4), 1))
    option = {o.label: o for o in options_of(node, operands)}["d1"]
    assert option.operands == (split(1, 3),)
    assert option.outputs == (split(1),) * 3


def test_pieces_of_unequal_sizes_split_in_units() -> None:
    node, operands = node_of(case("aten.split_with_sizes.default", randn(2, 16), (8, 4, 4), 1))
    option = {o.label: o for o in options_of(node, operands)}["d1"]
    assert (option.operands, option.extent) == ((split(1, 4),), 4)
    assert option.outputs == (split(1, 2), split(1), split(1))


def test_interesting_groups_are_those_that_views_make() -> None:
    x = Node(name="x", kind=Kind.INPUT, outputs=(TensorType(shape=(2, 8, 12), requires_grad=True),))
    flat = Node(
        name="flat", kind=Kind.OP, op="aten.reshape.default", args=(Ref("x"), (16, 12)),
        outputs=(TensorType(shape=(16, 12), requires_grad=True),),
    )  # fmt: skip
    pieces = Node(
        name="pieces", kind=Kind.OP, op="aten.split_with_sizes.default", args=(Ref("flat"), (4, 4, 4), 1),
        outputs=(TensorType(shape=(16, 4), requires_grad=True),) * 3,
    )  # fmt: skip
    template = Template(name="T", pattern="", nodes=(x, flat, pieces), outputs=(Ref("pieces"),))
    assert interesting_groups(template) == {2, 3}
