"""Pairs as text, local shapes, and which splits of several axes are legal on one dim."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import TensorType
from autopar.planner.errors import CannotLower
from autopar.planner.sharding.mesh import Axis, Mesh
from autopar.planner.sharding.placement import Pair, can_split, local_groups, local_type, normal, parse_pair, split
from hypothesis import given
from hypothesis import strategies as st

AXES = (Axis("dp", 2), Axis("tp", 2))


@given(st.integers(0, 9), st.integers(1, 99))
def test_pairs_read_back_from_their_text(dim: int, groups: int) -> None:
    for pair in (Pair("R"), Pair("R/P"), Pair("P/R"), split(dim, groups)):
        assert parse_pair(str(pair)) == pair


@pytest.mark.parametrize("text", ["", "S", "S()", "S(-1)", "S(0;)", "P", "S(0) ", "r"])
def test_other_texts_are_no_pairs(text: str) -> None:
    with pytest.raises(ValueError, match="no placement pair"):
        parse_pair(text)


def test_local_shapes_divide_by_every_axis_that_splits() -> None:
    value = TensorType(shape=(8, 12))
    assert local_type(value, {"dp": split(0), "tp": split(1, 3)}, AXES).shape == (4, 6)
    assert local_type(value, {"dp": split(0), "tp": split(0)}, AXES).shape == (2, 12)
    with pytest.raises(CannotLower, match="does not divide"):
        local_type(TensorType(shape=(3,)), {"tp": split(0)}, AXES)


@given(
    st.integers(1, 48),
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([2, 3, 4])), min_size=1, max_size=3),
)
def test_legal_splits_are_those_that_give_every_rank_equal_whole_runs(size: int, splits: list[tuple[int, int]]) -> None:
    """By the definition: each axis picks a part of each of its runs; ranks hold equally many positions, disjoint."""
    axes = tuple(Axis(f"a{i}", n) for i, (_, n) in enumerate(splits))
    layout = {axis.name: split(0, groups) for axis, (groups, _) in zip(axes, splits, strict=True)}
    if not can_split(TensorType(shape=(size,)), layout, axes):
        return
    world = 1
    for axis in axes:
        world *= axis.size
    held = [_positions(size, layout, axes, rank) for rank in range(world)]
    assert {len(part) for part in held} == {size // world}
    assert sorted(position for part in held for position in part) == list(range(size))


def _positions(size: int, layout: dict[str, Pair], axes: tuple[Axis, ...], rank: int) -> list[int]:
    coordinates = {}
    for axis in reversed(axes):
        coordinates[axis.name] = rank % axis.size
        rank //= axis.size
    found = list(range(size))
    for groups in sorted({pair.groups for pair in layout.values()}):
        parts, part = 1, 0
        for axis in axes:
            if layout[axis.name].groups == groups:
                parts, part = parts * axis.size, part * axis.size + coordinates[axis.name]
        run = size // groups
        found = [p for p in found if (p % run) // (run // parts) == part]
    return found


def test_a_finer_split_may_not_lie_across_a_coarser_one() -> None:
    value = TensorType(shape=(24,))
    assert can_split(value, {"dp": split(0), "tp": split(0, 4)}, AXES)
    assert not can_split(value, {"dp": split(0), "tp": split(0, 3)}, AXES)
    # Parts of the coarse split are eighths, runs of the fine one quarters.
    assert not can_split(value, {"dp": split(0, 2), "tp": split(0, 4)}, (Axis("dp", 4), Axis("tp", 2)))


def test_groups_are_counted_on_the_local_tensor() -> None:
    assert local_groups({"dp": split(0), "tp": split(0, 8)}, "tp", AXES) == 4
    assert local_groups({"dp": split(1), "tp": split(0, 8)}, "tp", AXES) == 8
    assert local_groups({"dp": split(0, 3), "tp": split(0, 3)}, "tp", AXES) == 3


def test_values_without_gradient_are_written_replicated() -> None:
    assert normal(Pair("R/P"), False) == Pair("R")
    assert normal(Pair("R/P"), True) == Pair("R/P")


def test_a_mesh_lists_its_axes_major_first_without_those_of_size_one() -> None:
    mesh = Mesh(pp=2, dp=2, tp=4, microbatches=8)
    assert [axis.name for axis in mesh.axes] == ["dp", "microbatch", "tp"]
    assert mesh.world_size == 16
    assert [axis.name for axis in Mesh(tp=2).axes] == ["tp"]
    with pytest.raises(ValueError, match="at least 1"):
        Mesh(dp=0)
