"""Interleaved 1F1B: every rank holds several stages and takes microbatches in groups of as many as there are ranks.

A pipeline fills in stages of 1/v of a rank's work, so the bubble shrinks by v; messages grow by v, and more is kept.
Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2, in the order of PyTorch's ScheduleInterleaved1F1B.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_rank(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Action, ...]:
    ahead, back = (turns(kind, rank, ranks, stages_per_rank, microbatches) for kind in (FORWARD, BACKWARD))
    warmup = min(len(ahead), 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
    actions = ahead[:warmup]
    for i, action in enumerate(back):
        actions.extend(ahead[warmup + i : warmup + i + 1])
        actions.append(action)
    return tuple(actions)


def turns(kind: str, rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> list[Action]:
    """The actions of a kind on a rank, in order: groups of microbatches go through its stages one after the other."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    return [
        Action(stage, kind, microbatch)
        for group in range(0, microbatches, ranks)
        for stage in (stages if kind == FORWARD else reversed(stages))
        for microbatch in range(group, group + ranks)
    ]


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
