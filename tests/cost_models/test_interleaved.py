import pytest
from autopar.cost_models.interleaved import interleaved_table
from autopar.cost_models.timeline import BACKWARD, FORWARD, simulate


@pytest.mark.parametrize(("ranks", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 8)])
def test_the_bubble_shrinks_by_the_stages_of_a_rank(ranks: int, per_rank: int, microbatches: int) -> None:
    table = interleaved_table(ranks, per_rank, microbatches)
    durations = {(s, kind): 1.0 if kind == FORWARD else 2.0 for s in range(ranks * per_rank) for kind in "FB"}
    timeline = simulate(table, durations)
    busy = 3.0 * per_rank * microbatches
    assert timeline.busy_seconds == pytest.approx([busy] * ranks)
    # Source: arXiv:2104.04473, section 2.2: (ranks - 1) forwards and backwards of one stage.
    assert timeline.step_seconds == pytest.approx(busy + 3.0 * (ranks - 1))


def test_every_action_runs_once() -> None:
    table = interleaved_table(4, 2, 8)
    actions = [action for row in table.by_rank for action in row]
    assert len(actions) == len(set(actions)) == 2 * 8 * 8
    assert all(action.stage % 4 == rank for rank, row in enumerate(table.by_rank) for action in row)
    assert {action.kind for action in actions} == {FORWARD, BACKWARD}


def test_microbatches_come_in_groups() -> None:
    with pytest.raises(ValueError, match="multiple of 4"):
        interleaved_table(4, 2, 6)
