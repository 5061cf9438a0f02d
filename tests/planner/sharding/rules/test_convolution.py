"""Convolutions on every option: channels, groups, and rows and columns whose borders come from the neighbours."""

from __future__ import annotations

import pytest
from autopar.planner.errors import CannotLower
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randn

CONV1D, CONV2D, CONV3D = "aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default"
ALL = ("n", "i", "o", "h0", "h1")
CASES = (
    case(CONV2D, randn(4, 4, 8, 8), randn(8, 4, 3, 3), None, (1, 1), (1, 1), labels=ALL),
    case(CONV2D, randn(4, 4, 16, 8), randn(4, 4, 3, 3), None, (2, 2), (1, 1), labels=ALL),
    case(CONV2D, randn(4, 4, 16, 8), randn(4, 4, 5, 3), None, (1, 1), (4, 2), (2, 2), labels=ALL),
    # A kernel of one sees no neighbour, nor does one as large as its stride.
    case(CONV2D, randn(4, 4, 8, 8), randn(4, 4, 1, 1), None, (2, 2), labels=("n", "i", "o", "s0", "s1")),
    case(CONV2D, randn(4, 4, 16, 8), randn(4, 4, 4, 2), None, (4, 2), labels=("n", "i", "o", "s0", "s1")),
    case(CONV2D, randn(4, 8, 8, 8), randn(8, 2, 3, 3), None, (1, 1), (1, 1), (1, 1), 4, labels=("n", "g", "h0", "h1")),
    case(CONV2D, randn(4, 4, 8, 8), randn(4, 4, 3, 3), labels=("n", "i", "o")),
    case(CONV2D, randn(4, 4, 8, 8), randn(8, 4, 3, 3), randn(8), (1, 1), (1, 1), labels=("n", "o")),
    case("aten.conv2d.padding", randn(4, 4, 8, 8), randn(8, 4, 3, 3), None, (1, 1), "same", labels=("n", "i", "o")),
    # Rows only on one side: an even kernel.
    case(CONV1D, randn(4, 4, 16), randn(4, 4, 4), None, (2,), (1,), labels=("n", "i", "o", "h0")),
    case(
        CONV3D,
        randn(4, 4, 4, 4, 4),
        randn(4, 4, 3, 1, 1),
        None,
        (1, 1, 1),
        (1, 0, 0),
        labels=("n", "i", "o", "h0", "s1", "s2"),
    ),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_convolutions_are_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_borders_are_declared_as_sent_both_ways() -> None:
    node, operands = node_of(case(CONV2D, randn(2, 3, 8, 8), randn(4, 3, 5, 3), None, (1, 1), (2, 1)))
    x = operands[0]
    rule = rule_of(node.op)
    local = [type(x)(shape=(2, 3, 4, 8), dtype=x.dtype, requires_grad=True), operands[1]]
    output = [type(x)(shape=(2, 4, 4, 8), dtype=x.dtype, requires_grad=True)]
    uses = rule.collectives(node, "h0", "tp", 2, local, output)
    assert [(use.op, use.num_bytes, use.phase) for use in uses] == [
        ("send", 2 * 2 * 3 * 8 * 8, phase) for phase in ("forward", "forward", "backward", "backward")
    ]
    # With split rows the columns are exchanged after the rows were extended by 2 + 2.
    both = rule.collectives(node, "h1", "tp", 2, [type(x)(shape=(2, 3, 4, 4), dtype=x.dtype), operands[1]], output)
    assert [use.num_bytes for use in both] == [2 * 3 * 8 * 8] * 2


def test_parts_are_never_shorter_than_the_halo() -> None:
    node, operands = node_of(case(CONV2D, randn(1, 1, 8, 4), randn(1, 1, 7, 1), None, (1, 1), (3, 0)))
    extents = {option.label: option.extent for option in options_of(node, operands)}
    assert extents["h0"] == 2  # parts of four rows hold three; parts of two do not


def test_two_axes_may_not_split_the_same_rows() -> None:
    node, _ = node_of(CASES[0])
    with pytest.raises(CannotLower, match="one axis only"):
        rule_of(node.op).localise(node, {"dp": "h0", "tp": "h0"}, node.outputs, {"dp": 2, "tp": 2})


def test_work_counts_the_three_products() -> None:
    node, operands = node_of(case(CONV2D, randn(2, 8, 6, 6), randn(12, 4, 3, 3), None, (1, 1), (1, 1), (1, 1), 2))
    work = rule_of(node.op).work(node, operands, node.outputs)
    flops = 2 * (2 * 6 * 6) * 12 * (4 * 9)
    assert work.forward.total_flops == flops
    assert work.backward.total_flops == 2 * flops
