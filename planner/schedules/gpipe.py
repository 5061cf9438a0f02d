"""GPipe: every forward, then every backward in the same order.

Source: Huang et al. 2019, arXiv:1811.06965.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(
        tuple(Action(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches))
        for stage in range(ranks)
    )


def _in_flight(stage: int, ranks: int, microbatches: int) -> int:
    return microbatches


def _least_passes(ranks: int, microbatches: int) -> float:
    """All forwards take one pass through all stages and m - 1 more through the slowest, and so do all backwards."""
    return 1 + (microbatches - 1) / ranks


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    if ranks < 2:
        return "it needs at least 2 stages"
    if stages_per_rank > 1:
        return f"it runs one stage per rank, not {stages_per_rank}"
    return ""


SCHEDULE = Schedule(
    name="gpipe",
    description="all forwards, then all backwards; keeps every microbatch",
    torch_class="ScheduleGPipe",
    actions=_actions,
    in_flight=_in_flight,
    least_passes=_least_passes,
    searched_from=2,  # with one microbatch it is sequential
    refuse=_refuse,
)
