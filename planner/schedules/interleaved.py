"""Interleaved 1F1B: every rank holds several stages and takes microbatches in groups of as many as there are ranks.

A pipeline fills in stages of 1/v of a rank's work, so the bubble shrinks by v; messages grow by v, and more is kept.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2, in the order of PyTorch's ScheduleInterleaved1F1B.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_rank(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Action, ...]:
    total = microbatches * stages_per_rank
    warmup = min(total, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
    actions = [turn(i, FORWARD, rank, ranks, stages_per_rank) for i in range(warmup)]
    for i in range(total):
        if i + warmup < total:
            actions.append(turn(i + warmup, FORWARD, rank, ranks, stages_per_rank))
        actions.append(turn(i, BACKWARD, rank, ranks, stages_per_rank))
    return tuple(actions)


def turn(number: int, kind: str, rank: int, ranks: int, stages_per_rank: int) -> Action:
    """The `number`-th action of a kind on a rank: groups of microbatches go through its stages one after the other."""
    chunk = number // ranks % stages_per_rank
    if kind != FORWARD:
        chunk = stages_per_rank - 1 - chunk
    return Action(chunk * ranks + rank, kind, number // (ranks * stages_per_rank) * ranks + number % ranks)


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    if ranks < 2:
        return "it needs at least 2 ranks"
    if stages_per_rank < 2:
        return "it needs at least 2 stages per rank; with one it is 1f1b"
    return refuse_groups(ranks, microbatches)


def refuse_groups(ranks: int, microbatches: int) -> str:
    """Why microbatches cannot be taken in groups of the ranks, "" if they can."""
    if microbatches % ranks:
        return f"it needs a multiple of {ranks} microbatches, one for each rank, and there are {microbatches}"
    return ""


SCHEDULE = Schedule(
    name="interleaved",
    description="1F1B with several stages per rank; a smaller bubble for more messages",
    torch_class="ScheduleInterleaved1F1B",
    actions=_actions,
    refuse=_refuse,
    stages_per_rank=(2, 3, 4),
)
