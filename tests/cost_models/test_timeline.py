import pytest
from autopar.cost_models.timeline import Action, ActionTable, parse_action, schedule_seconds, simulate
from autopar.planner.schedules import action_table
from hypothesis import given
from hypothesis import strategies as st


def durations(forward: list[float], backward: list[float]) -> dict[tuple[int, str], float]:
    return {(s, kind): times[s] for kind, times in (("F", forward), ("B", backward)) for s in range(len(forward))}


def test_actions_print_as_pytorch_prints_them() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert parse_action("12B34") == Action(12, "B", 34)
    with pytest.raises(ValueError, match="no action"):
        parse_action("2X0")


@given(st.integers(2, 8), st.integers(1, 12), st.floats(0.1, 10), st.floats(0.1, 10))
def test_the_bubble_of_equal_stages(stages: int, extra: int, forward: float, backward: float) -> None:
    microbatches = stages + extra - 1
    times = durations([forward] * stages, [backward] * stages)
    for name in ("gpipe", "1f1b"):
        timeline = simulate(action_table(name, stages, microbatches), times)
        slots = microbatches + stages - 1
        assert timeline.step_seconds == pytest.approx(slots * (forward + backward))
        assert timeline.bubble_fraction == pytest.approx((stages - 1) / slots)


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=2, max_size=6), st.integers(0, 10))
def test_uneven_stages_under_gpipe(stages: list[tuple[float, float]], extra: int) -> None:
    """All forwards, then all backwards: (m - 1) max + sum, each way."""
    forward, backward = ([pair[i] for pair in stages] for i in range(2))
    m = len(stages) + extra
    expected = (m - 1) * (max(forward) + max(backward)) + sum(forward) + sum(backward)
    assert simulate(action_table("gpipe", len(stages), m), durations(forward, backward)).step_seconds == pytest.approx(
        expected
    )


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.integers(0, 20), st.floats(0.5, 3))
def test_uneven_stages_under_1f1b(forward: list[float], extra: int, ratio: float) -> None:
    """(m - 1) max(f + b) + sum(f + b) is exact where the slowest stage never starves, and a lower bound otherwise."""
    m = len(forward) + extra
    both = [f * (1 + ratio) for f in forward]
    times = durations(forward, [f * ratio for f in forward])
    step = simulate(action_table("1f1b", len(forward), m), times).step_seconds
    slowest = both.index(max(both))
    busy = m * max(both) + sum(forward[:slowest]) + sum(f * ratio for f in forward[:slowest])
    assert step >= busy * (1 - 1e-9)
    assert step <= ((m - 1) * max(both) + sum(both)) * (1 + 1e-9)


def test_one_slow_stage_under_1f1b() -> None:
    for slow in range(4):
        forward = [1.0] * 4
        forward[slow] = 3.0
        backward = [2 * f for f in forward]
        step = simulate(action_table("1f1b", 4, 12), durations(forward, backward)).step_seconds
        both = [f + b for f, b in zip(forward, backward, strict=True)]
        assert step == pytest.approx(12 * max(both) + sum(both[:slow]))  # the slow stage never waits once it has begun


def test_transfers_add_to_fill_and_drain() -> None:
    times = durations([1.0] * 4, [2.0] * 4)
    table = action_table("gpipe", 4, 8)
    plain, slow = simulate(table, times), simulate(table, times, 0.5)
    assert slow.step_seconds == pytest.approx(plain.step_seconds + 2 * 3 * 0.5)
    assert simulate(table, times, [0.5, 0.0, 0.0]).step_seconds == pytest.approx(plain.step_seconds + 1.0)


def test_no_pipeline_has_no_bubble() -> None:
    timeline = simulate(action_table("none", 1, 5), {(0, "F"): 1.0, (0, "B"): 2.0}, 7.0)
    assert timeline.step_seconds == pytest.approx(15.0)
    assert timeline.bubble_fraction == pytest.approx(0.0)


def test_a_straggler_slows_the_step() -> None:
    times = durations([1.0] * 3, [2.0] * 3)
    table = action_table("1f1b", 3, 6)
    assert simulate(table, times, slow={1: 1.5}).step_seconds > 1.3 * simulate(table, times).step_seconds


def test_events_follow_the_schedule_and_never_overlap() -> None:
    table = action_table("1f1b", 3, 6)
    timeline = simulate(table, durations([1.0, 2.0, 1.5], [2.0, 3.0, 2.5]), 0.25)
    ends = {event.action: event.end_seconds for row in timeline.events for event in row}
    for rank, row in enumerate(timeline.events):
        assert [event.action for event in row] == list(table.by_rank[rank])
        assert all(a.end_seconds <= b.start_seconds for a, b in zip(row, row[1:], strict=False))
        for event in row:
            stage, microbatch = event.action.stage, event.action.microbatch
            if event.action.kind == "F" and stage:
                assert event.start_seconds >= ends[Action(stage - 1, "F", microbatch)] + 0.25
            if event.action.kind == "B" and stage < 2:
                assert event.start_seconds >= ends[Action(stage + 1, "B", microbatch)] + 0.25
        assert timeline.idle_seconds(rank) == pytest.approx(timeline.step_seconds - timeline.busy_seconds[rank])
    assert schedule_seconds(table, durations([1.0, 2.0, 1.5], [2.0, 3.0, 2.5]), 0.25) == timeline.step_seconds


def test_impossible_schedules() -> None:
    forward, backward = Action(0, "F", 0), Action(0, "B", 0)
    with pytest.raises(ValueError, match="deadlocks: ranks wait at 0B0"):
        ActionTable(by_rank=((backward, forward),))
    with pytest.raises(ValueError, match="twice"):
        ActionTable(by_rank=((forward, forward),))
    with pytest.raises(ValueError, match="1F0 needs 0F0"):
        ActionTable(by_rank=((Action(1, "F", 0),),))
    with pytest.raises(ValueError, match="2 edges for 4 stages"):
        simulate(action_table("gpipe", 4, 4), durations([1.0] * 4, [1.0] * 4), [0.0, 0.0])
