"""Every conversion between legal layouts on two axes, on real ranks; the order, types and payloads of `changes`."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from autopar.planner.capture.graph import TensorType
from autopar.planner.errors import CannotLower
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import Pair, can_split, local_type, parse_pair
from autopar.planner.sharding.redistribute import changes, conversion, has_conversion
from hypothesis import assume, given
from hypothesis import strategies as st

AXES = (Axis("dp", 2), Axis("tp", 4))
VALUE = TensorType(shape=(16, 24), requires_grad=True)
pairs = st.sampled_from(["R", "R/P", "P/R", "S(0)", "S(1)", "S(0;2)", "S(1;3)"]).map(parse_pair)
layouts = st.fixed_dictionaries({"dp": pairs, "tp": pairs}).filter(lambda layout: can_split(VALUE, layout, AXES))


@pytest.mark.slow
@pytest.mark.gloo
def test_every_conversion_is_exact_on_two_axes(tmp_path: Path) -> None:
    script = Path(__file__).parent / "conversion_ranks.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    count, failures = pickle.loads((tmp_path / "report.pkl").read_bytes())
    assert not failures, f"{len(failures)} of {count} failed:\n" + "\n".join(failures[:40])
    assert count > 1000


@given(layouts)
def test_a_layout_converts_to_itself_for_free(layout: dict[str, Pair]) -> None:
    assert changes(VALUE, layout, layout, AXES) == ()


@given(layouts, layouts)
def test_local_types_follow_from_step_to_step(source: dict[str, Pair], target: dict[str, Pair]) -> None:
    assume(all(has_conversion(source[axis.name], target[axis.name]) for axis in AXES))
    steps = changes(VALUE, source, target, AXES)
    state = dict(source)
    before = local_type(VALUE, source, AXES)
    for step in steps:
        assert step.source == state[step.axis]
        assert step.before == before
        state[step.axis] = step.target
        assert can_split(VALUE, state, AXES)
        before = local_type(VALUE, state, AXES)
        assert step.after == before
    assert state == target


@given(layouts, layouts)
def test_no_order_of_direct_conversions_is_longer_than_the_axes_that_move(
    source: dict[str, Pair], target: dict[str, Pair]
) -> None:
    assume(all(has_conversion(source[axis.name], target[axis.name]) for axis in AXES))
    moving = sum(source[axis.name] != target[axis.name] for axis in AXES)
    assert moving <= len(changes(VALUE, source, target, AXES)) <= 2 * len(AXES)


def test_a_major_axis_that_comes_late_makes_the_minor_one_step_aside() -> None:
    source, target = {"tp": parse_pair("S(0)")}, {"dp": parse_pair("S(0)"), "tp": parse_pair("S(0)")}
    steps = changes(VALUE, source, target, AXES)
    assert [(s.axis, str(s.source), str(s.target)) for s in steps] == [
        ("tp", "S(0)", "R"), ("dp", "R", "S(0)"), ("tp", "R", "S(0)"),
    ]  # fmt: skip


def test_splits_of_one_dim_are_undone_minor_axis_first() -> None:
    both = {"dp": parse_pair("S(0)"), "tp": parse_pair("S(0)")}
    assert [step.axis for step in changes(VALUE, both, {}, AXES)] == ["tp", "dp"]
    assert [step.axis for step in changes(VALUE, {}, both, AXES)] == ["dp", "tp"]


def test_a_time_axis_never_goes_by_way_of_replicated() -> None:
    axes = (Axis("dp", 2), Axis("microbatch", 2))
    with pytest.raises(CannotLower, match="no legal order"):
        changes(VALUE, {"microbatch": parse_pair("S(0)")}, {a.name: parse_pair("S(0)") for a in axes}, axes)


def test_payloads_are_those_of_the_whole_group() -> None:
    sharded = {"tp": parse_pair("S(0)")}
    (step,) = changes(VALUE, sharded, {"tp": parse_pair("R/P")}, AXES)
    uses = step.collectives(AXES[1])
    assert [(u.op, u.phase, u.num_bytes) for u in uses] == [
        ("all_gather", "forward", VALUE.num_bytes),
        ("reduce_scatter", "backward", VALUE.num_bytes),
    ]
    (step,) = changes(VALUE, sharded, {"tp": parse_pair("S(1)")}, AXES)
    assert {u.num_bytes for u in step.collectives(AXES[1])} == {VALUE.num_bytes // 4}


def test_values_without_gradient_have_no_backward_collectives() -> None:
    mask = TensorType(shape=(16, 24), dtype="bool")
    (step,) = changes(mask, {"tp": parse_pair("S(0)")}, {}, AXES)
    assert [use.phase for use in step.collectives(AXES[1])] == ["forward"]


def test_what_the_table_lacks_does_not_exist() -> None:
    with pytest.raises(CannotLower, match="no conversion from R/P to P/R"):
        conversion(parse_pair("R/P"), parse_pair("P/R"))
    assert conversion(parse_pair("R"), parse_pair("R")) is None
