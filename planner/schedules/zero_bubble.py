"""Zero bubble, ZB-1P: 1F1B, interleaved or not, whose weight gradients wait and fill what would be bubble.

Rank r lags r weight gradients behind, so that no rank keeps more than the first one does.
Source: Qi et al. 2024, arXiv:2401.10241, section 3, in the order of PyTorch's ScheduleInterleavedZeroBubble.
"""

from ...cost_models.timeline import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from .interleaved import refuse_groups, turns
from .registry import Actions, Schedule


def _actions(ranks: int, stages_per_rank: int, microbatches: int) -> Actions:
    return tuple(_of_rank(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks))


def _of_rank(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Action, ...]:
    kinds = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
    ahead, back, weights = (turns(kind, rank, ranks, stages_per_rank, microbatches) for kind in kinds)
    warmup = min(len(ahead), ranks - rank - 1 + (stages_per_rank - 1) * ranks)
    actions = ahead[:warmup]
    for i, action in enumerate(back):
        actions.extend(ahead[warmup + i : warmup + i + 1])
        actions.append(action)
        if i >= rank:
            actions.append(weights[i - rank])
    return (*actions, *weights[max(0, len(weights) - rank) :])


def _refuse(ranks: int, stages_per_rank: int, microbatches: int) -> str:
    return "it needs at least 2 ranks" if ranks < 2 else refuse_groups(ranks, microbatches)


SCHEDULE = Schedule(
    name="zero-bubble",
    description="1F1B with weight gradients put off into the bubble (ZB-1P)",
    torch_class="ScheduleInterleavedZeroBubble",
    actions=_actions,
    refuse=_refuse,
    stages_per_rank=(1, 2),
    splits_backward=True,
)
