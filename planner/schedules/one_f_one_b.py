"""1F1B: stage s of S runs S - s forwards, then alternates one backward and one forward, then drains.

Source: Narayanan et al. 2019, PipeDream, with the flush of arXiv:2104.04473.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Schedule


def _actions(stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(_of_stage(stage, stages, microbatches) for stage in range(stages))


def _of_stage(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    warmup = _in_flight(stage, stages, microbatches)
    found = [Action(stage, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        found.append(Action(stage, BACKWARD, m))
        if m + warmup < microbatches:
            found.append(Action(stage, FORWARD, m + warmup))
    return tuple(found)


def _in_flight(stage: int, stages: int, microbatches: int) -> int:
    return min(microbatches, stages - stage)


def _refuse(stages: int, microbatches: int) -> str:
    if stages < 2:
        return "it needs at least 2 stages"
    if microbatches < stages:
        return f"it needs at least as many microbatches as stages, and there are {microbatches} for {stages}"
    return ""


SCHEDULE = Schedule(
    name="1f1b",
    description="one forward, one backward in turn; keeps at most one microbatch per stage that follows",
    torch_class="Schedule1F1B",
    actions=_actions,
    in_flight=_in_flight,
    refuse=_refuse,
)
