"""GPipe: every forward, then every backward in the same order.

Source: Huang et al. 2019, arXiv:1811.06965.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Schedule


def _actions(stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(
        tuple(Action(stage, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches))
        for stage in range(stages)
    )


def _in_flight(stage: int, stages: int, microbatches: int) -> int:
    return microbatches


def _refuse(stages: int, microbatches: int) -> str:
    return "" if stages > 1 else "it needs at least 2 stages"


SCHEDULE = Schedule(
    name="gpipe",
    description="all forwards, then all backwards; keeps every microbatch",
    torch_class="ScheduleGPipe",
    actions=_actions,
    in_flight=_in_flight,
    refuse=_refuse,
)
