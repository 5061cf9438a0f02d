"""Zero bubble, ZB-V: two stages per rank, placed there and back, so that the first rank also holds the last stage.

Without bubble where F, I and W take alike, in the memory of 1F1B.
Source: Qi et al. 2024, arXiv:2401.10241, section 6, in the order of PyTorch's ScheduleZBVZeroBubble.
"""

from itertools import count

from ...cost_models.timeline import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_rank(rank, ranks, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    there, back = rank, 2 * ranks - 1 - rank
    # The pattern is that of a full pipeline; microbatches that there are not are left out of it.
    planned = max(2 * ranks - 1, microbatches)
    numbers = {(stage, kind): count() for stage in (there, back) for kind in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)}
    done = dict.fromkeys(numbers, 0)
    found: list[Action] = []

    def run(stage: int, *kinds: str) -> None:
        for kind in kinds:
            found.append(Action(stage, kind, next(numbers[stage, kind])))
            done[stage, kind] += 1

    def drain(stage: int) -> None:
        while done[stage, WEIGHT_GRADIENT] < done[stage, INPUT_GRADIENT]:
            run(stage, WEIGHT_GRADIENT)

    for _ in range(2 * (ranks - rank) - 1):
        run(there, FORWARD)
    for _ in range(rank):
        run(back, FORWARD)
        run(there, FORWARD)
    for _ in range(ranks - rank):
        run(back, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    while done[back, FORWARD] < done[there, FORWARD] or done[there, FORWARD] < planned:
        if done[there, FORWARD] < planned:
            run(there, FORWARD)
        run(there, INPUT_GRADIENT, WEIGHT_GRADIENT)
        run(back, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    for _ in range(rank):
        run(there, INPUT_GRADIENT)
        run(back, INPUT_GRADIENT)
    for _ in range(ranks - rank):
        run(there, INPUT_GRADIENT, WEIGHT_GRADIENT)
    drain(back)
    drain(there)
    return tuple(action for action in found if action.microbatch < microbatches)


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    if ranks < 2:
        return "it needs at least 2 ranks"
    if stages_per_rank != 2:
        return f"it runs 2 stages per rank, not {stages_per_rank}"
    if microbatches < ranks:
        return f"it needs at least as many microbatches as ranks, and there are {microbatches} for {ranks}"
    return ""


SCHEDULE = Schedule(
    name="zero-bubble-v",
    description="two stages per rank there and back, weight gradients in the bubble (ZB-V)",
    torch_class="ScheduleZBVZeroBubble",
    actions=_actions,
    refuse=_refuse,
    stages_per_rank=(2,),
    placement="v",
    splits_backward=True,
)
