"""1F1B: stage s of S runs S - s forwards, then alternates one backward and one forward, then drains.

Source: Narayanan et al. 2019, PipeDream, with the flush of arXiv:2104.04473.
"""

from ...cost_models.timeline import BACKWARD, FORWARD, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_stage(stage, ranks, microbatches) for stage in range(ranks))


def _of_stage(stage: int, stages: int, microbatches: int) -> tuple[Action, ...]:
    warmup = _in_flight(stage, stages, microbatches)
    found = [Action(stage, FORWARD, m) for m in range(warmup)]
    for m in range(microbatches):
        found.append(Action(stage, BACKWARD, m))
        if m + warmup < microbatches:
            found.append(Action(stage, FORWARD, m + warmup))
    return tuple(found)


def _in_flight(stage: int, ranks: int, microbatches: int) -> int:
    return min(microbatches, ranks - stage)


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    if ranks < 2:
        return "it needs at least 2 stages"
    if stages_per_rank > 1:
        return f"it runs one stage per rank, not {stages_per_rank}; interleaved runs several"
    if microbatches < ranks:
        return f"it needs at least as many microbatches as stages, and there are {microbatches} for {ranks}"
    return ""


SCHEDULE = Schedule(
    name="1f1b",
    description="one forward, one backward in turn; keeps at most one microbatch per stage that follows",
    torch_class="Schedule1F1B",
    actions=_actions,
    in_flight=_in_flight,
    refuse=_refuse,
)
