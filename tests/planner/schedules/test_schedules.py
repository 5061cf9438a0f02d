import random

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.timeline import schedule_seconds, simulate
from autopar.planner.schedules import (
    Alive,
    action_table,
    get_schedule,
    in_flight,
    kept_at_once,
    least_passes,
    schedule_names,
)


def test_the_folder_is_walked() -> None:
    assert schedule_names() == ("1f1b", "gpipe", "interleaved", "none", "sequential", "zero-bubble", "zero-bubble-v")


def test_what_ranks_run() -> None:
    rows = [" ".join(map(str, row)) for row in action_table("1f1b", 3, 4).by_rank]
    assert rows == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert [" ".join(map(str, row)) for row in action_table("gpipe", 2, 2).by_rank] == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
    ]
    assert [" ".join(map(str, row)) for row in action_table("none", 1, 2).by_rank] == ["0F0 0B0 0F1 0B1"]


SHAPES = [(1, 1, 1), (1, 1, 4), (2, 1, 1), (2, 1, 2), (4, 1, 4), (4, 1, 9), (3, 1, 2), (2, 2, 4), (3, 2, 6), (4, 3, 8)]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(
    ("ranks", "per_rank", "microbatches"), [*SHAPES, (2, 2, 32), (4, 2, 7), (2, 1, 16), (4, 3, 24), (3, 2, 13)]
)
def test_what_is_kept_is_what_the_actions_hold(name: str, ranks: int, per_rank: int, microbatches: int) -> None:
    schedule = get_schedule(name)
    if reason := schedule.refuse(ranks, per_rank, microbatches):
        with pytest.raises(AutoparError) as caught:
            action_table(name, ranks, microbatches, per_rank)
        assert reason in caught.value.what
        return
    kept = kept_at_once(name, ranks, microbatches, per_rank)
    most = in_flight(name, ranks, microbatches, per_rank)
    for rank, row in enumerate(action_table(name, ranks, microbatches, per_rank).by_rank):
        stages = schedule.stages_of(rank, ranks, ranks * per_rank)
        assert {action.stage for action in row} == set(stages)
        alive = dict.fromkeys(stages, Alive(0))
        seen = set()
        for stage, kind, _ in row:
            untouched, halfway = alive[stage]
            if kind == "F":
                untouched += 1
            elif kind == "I" and stage > 0:  # the first stage does everything in W
                untouched, halfway = untouched - 1, halfway + 1
            elif kind == "W" and stage > 0:
                halfway -= 1
            elif kind != "I":
                untouched -= 1
            alive[stage] = Alive(untouched, halfway)
            seen.add(tuple(alive.values()))
        assert set(alive.values()) == {Alive(0)}
        assert len(row) == (3 if schedule.splits_backward else 2) * microbatches * per_rank
        assert set(kept[rank]) <= seen
        assert all(any(no_more(one, other) for other in kept[rank]) for one in seen)
        assert sum(most[stage] for stage in stages) == max(sum(each.total for each in one) for one in seen)


def no_more(one: tuple[Alive, ...], other: tuple[Alive, ...]) -> bool:
    """Whether `one` keeps no more on any stage, where what is halfway takes at least what is untouched does."""
    return all(a.total <= b.total and a.halfway <= b.halfway for a, b in zip(one, other, strict=True))


def _in_passes(name: str, ranks: int, per_rank: int, microbatches: int, shares: list[float], forward: float) -> float:
    """A step over a pass through the model, of which each stage has a share."""
    kinds = {"F": forward, "I": 0.4 * (1 - forward), "W": 0.6 * (1 - forward), "B": 1 - forward}
    durations = {(s, kind): part * share for s, share in enumerate(shares) for kind, part in kinds.items()}
    return schedule_seconds(action_table(name, ranks, microbatches, per_rank), durations) / sum(shares)


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [*SHAPES, (3, 1, 3), (4, 1, 5), (2, 2, 2), (4, 2, 8)])
def test_no_stages_are_faster_than_the_fewest_passes(name: str, ranks: int, per_rank: int, microbatches: int) -> None:
    if get_schedule(name).refuse(ranks, per_rank, microbatches):
        return
    least, rng = least_passes(name, ranks, microbatches, per_rank), random.Random(ranks)
    for forward in (0.2, 1 / 3, 0.5):
        best = [1.0] * (ranks * per_rank)
        fastest = _in_passes(name, ranks, per_rank, microbatches, best, forward)
        for _ in range(60):  # downhill from even stages
            shares = [share * rng.uniform(0.7, 1.4) for share in best]
            seconds = _in_passes(name, ranks, per_rank, microbatches, shares, forward)
            assert seconds >= least * (1 - 1e-12)
            if seconds < fastest:
                best, fastest = shares, seconds
        assert fastest >= least * (1 - 1e-12)


def test_a_fuller_first_stage_is_faster_where_there_are_as_many_microbatches_as_ranks() -> None:
    even, fuller = ([_in_passes("1f1b", 2, 1, 2, shares, 0.5)] for shares in ([1.0, 1.0], [2.0, 1.0]))
    assert even == [pytest.approx(1.5)]
    assert fuller == [pytest.approx(least_passes("1f1b", 2, 2))] == [pytest.approx(4 / 3)]
    assert _in_passes("1f1b", 4, 1, 5, [1.0] * 4, 0.3) == pytest.approx(least_passes("1f1b", 4, 5))


class _Stage:
    """What PyTorch's schedules ask of a stage before they run."""

    def __init__(self, rank: int, ranks: int, num_stages: int) -> None:
        self.group_rank, self.group_size, self.num_stages = rank, ranks, num_stages
        self.submod = None


@pytest.mark.parametrize("name", [n for n in schedule_names() if get_schedule(n).is_multi_stage])
@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [*SHAPES, (4, 2, 4), (4, 2, 16), (8, 4, 16)])
def test_pytorch_runs_the_same_actions(name: str, ranks: int, per_rank: int, microbatches: int) -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    schedule = get_schedule(name)
    if schedule.refuse(ranks, per_rank, microbatches):
        return
    stages = [_Stage(0, ranks, ranks * per_rank) for _ in range(per_rank)]
    theirs = getattr(pipelining, schedule.torch_class)(stages, microbatches)
    for rank, row in enumerate(action_table(name, ranks, microbatches, per_rank).by_rank):
        assert [str(action) for action in row] == [str(a) for a in theirs.pipeline_order[rank] if a is not None]
    ours = {stage: schedule.rank_of(stage, ranks) for stage in range(ranks * per_rank)}
    assert ours == theirs.stage_index_to_group_rank


def test_pytorch_has_the_classes() -> None:
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    for name in schedule_names():
        torch_class = get_schedule(name).torch_class
        assert not torch_class or hasattr(pipelining, torch_class)


def test_unknown_names_list_the_valid_ones() -> None:
    with pytest.raises(AutoparError) as caught:
        get_schedule("1f2b")
    assert "did you mean 1f1b" in str(caught.value)
    with pytest.raises(AutoparError, match="as many microbatches as stages"):
        action_table("1f1b", 4, 3)


def test_1f1b_keeps_less_than_gpipe_and_takes_as_long() -> None:
    times = {(s, kind): 1.0 if kind == "F" else 2.0 for s in range(4) for kind in "FB"}
    steps = [simulate(action_table(name, 4, 8), times).step_seconds for name in ("gpipe", "1f1b")]
    assert steps[0] == pytest.approx(steps[1])
    assert in_flight("1f1b", 4, 8)[0] < in_flight("gpipe", 4, 8)[0]


def test_interleaving_divides_the_bubble() -> None:
    ranks, microbatches = 4, 16
    for per_rank in (2, 3, 4):
        times = {(s, kind): (1.0 if kind == "F" else 2.0) / per_rank for s in range(4 * per_rank) for kind in "FB"}
        timeline = simulate(action_table("interleaved", ranks, microbatches, per_rank), times)
        assert timeline.step_seconds == pytest.approx(3 * microbatches + 3 * (ranks - 1) / per_rank)


def test_zero_bubble_schedules_wait_less() -> None:
    """Source of the closed forms: arXiv:2401.10241, table 1, with F = I = W."""
    ranks, microbatches = 4, 12
    for name, per_rank, bubble in (("zero-bubble", 1, ranks - 1), ("zero-bubble-v", 2, 0)):
        times = {(s, kind): 1.0 / per_rank for s in range(ranks * per_rank) for kind in "FIW"}
        timeline = simulate(action_table(name, ranks, microbatches, per_rank), times)
        fill = min(row[0].start_seconds for row in timeline.events[-1:])
        assert timeline.step_seconds <= 3 * microbatches + bubble + fill + 1e-9
        whole = {(s, kind): 1.0 if kind == "F" else 2.0 for s in range(ranks) for kind in "FB"}
        assert timeline.step_seconds < simulate(action_table("1f1b", ranks, microbatches), whole).step_seconds
