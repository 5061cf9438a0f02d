import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.timeline import simulate
from autopar.planner.schedules import action_table, get_schedule, schedule_names


def test_the_folder_is_walked() -> None:
    assert schedule_names() == ("1f1b", "gpipe", "none")


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


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (2, 2), (4, 4), (4, 9), (3, 2)])
def test_in_flight_is_what_the_actions_hold(name: str, stages: int, microbatches: int) -> None:
    schedule = get_schedule(name)
    if reason := schedule.refuse(stages, microbatches):
        with pytest.raises(AutoparError) as caught:
            action_table(name, stages, microbatches)
        assert reason in caught.value.what
        return
    for rank, row in enumerate(action_table(name, stages, microbatches).by_rank):
        alive = peak = 0
        for action in row:
            alive += 1 if action.kind == "F" else -1
            peak = max(peak, alive)
        assert alive == 0
        assert len(row) == 2 * microbatches
        assert peak == schedule.in_flight(rank, stages, microbatches)


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
    assert get_schedule("1f1b").in_flight(0, 4, 8) < get_schedule("gpipe").in_flight(0, 4, 8)
