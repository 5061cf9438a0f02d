"""Layer-wise model parallelism without microbatches: the batch passes the stages in turn, one rank works at a time.

The naive baseline that pipelines are measured by, and all that a model which needs its whole batch at once can do.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple((Action(stage, FORWARD, 0), Action(stage, BACKWARD, 0)) for stage in range(ranks))


def _in_flight(stage: int, ranks: int, microbatches: int) -> int:
    return 1


def _least_passes(ranks: int, microbatches: int) -> float:
    return 1.0


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    if ranks < 2:
        return "it needs at least 2 stages"
    if stages_per_rank > 1:
        return f"it runs one stage per rank, not {stages_per_rank}"
    if microbatches > 1:
        return f"it runs the batch as one microbatch, and there are {microbatches}"
    return ""


SCHEDULE = Schedule(
    name="sequential",
    description="one microbatch passes the stages in turn; naive model parallelism",
    torch_class="ScheduleGPipe",
    actions=_actions,
    in_flight=_in_flight,
    least_passes=_least_passes,
    refuse=_refuse,
)
