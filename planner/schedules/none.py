"""No pipeline: one stage runs forward and backward of every microbatch in turn (gradient accumulation)."""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return (tuple(Action(0, kind, m) for m in range(microbatches) for kind in (FORWARD, BACKWARD)),)


def _in_flight(stage: int, ranks: int, microbatches: int) -> int:
    return 1


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    stages = ranks * stages_per_rank
    return "" if stages == 1 else f"it has no pipeline, and there are {stages} stages"


SCHEDULE = Schedule(
    name="none",
    description="one stage; microbatches accumulate gradients",
    torch_class="",
    actions=_actions,
    in_flight=_in_flight,
    refuse=_refuse,
)
