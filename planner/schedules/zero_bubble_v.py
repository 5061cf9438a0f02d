"""Zero bubble, ZB-V: two stages per rank, placed there and back, so that the first rank also holds the last stage.

Without bubble where F, I and W take alike, in the memory of 1F1B.
Source: Qi et al. 2024, arXiv:2401.10241, section 6, in the order of PyTorch's ScheduleZBVZeroBubble.
"""

from collections import defaultdict
from itertools import count

from ...cost_models.timeline import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_rank(rank, ranks, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, microbatches: int) -> tuple[Action, ...]:
    stages = rank, 2 * ranks - 1 - rank
    kinds = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
    (f, i, w), (f_back, i_back, w_back) = ([(stage, kind) for kind in kinds] for stage in stages)
    # The pattern is that of a full pipeline; microbatches that there are not are left out of it.
    planned = max(2 * ranks - 1, microbatches)
    pattern = (
        [f] * (2 * (ranks - rank) - 1)
        + [f_back, f] * rank
        + [f_back, i_back, w_back] * (ranks - rank)
        + [f, i, w, f_back, i_back, w_back] * (planned - (2 * ranks - 1 - rank))
        + [i, w, f_back, i_back, w_back] * (ranks - 1 - rank)
        + [i, i_back] * rank
        + [i, w] * (ranks - rank)
        + [w_back] * rank
        + [w] * rank
    )
    numbers: dict[tuple[int, str], count[int]] = defaultdict(count)
    numbered = (Action(*each, next(numbers[each])) for each in pattern)
    return tuple(action for action in numbered if action.microbatch < microbatches)


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
