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


def _least_passes(ranks: int, microbatches: int) -> float:
    """What even stages take, but where there are as many microbatches as ranks: a fuller first stage is faster then.

    With c_s = f_s + b_s the seconds of stage s, rank r cannot be done before

        sum_{s<r} c_s + (m - p + r + 1) c_r + 2 sum_{s>r} c_s                      m > p - r

    for the first microbatch comes to it, goes to the last stage and back, the last one does so too, and between these
    it works on all but p - r - 1 forwards and as many backwards, which it may do meanwhile. Where the first rank has
    all forwards before its first backward, it may do p - 1 forwards or p - 1 backwards meanwhile: half of both,

        (m - (p - 1) / 2) c_0 + sum_{s>0} c_s                                      r = 0, m = p

    Weights w_r >= 0 of these rows with which every c_s counts alike give the value, for whatever stages: those with
    w_{s+1} (m - p + s + 1) = w_s (m - p + s - 1), and for m = p w_0 = 1, w_1 = (p - 1) / 2, the others 0.
    """
    return 1 + (microbatches - 1) / ranks if microbatches > ranks else 2 * ranks / (ranks + 1)


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
    least_passes=_least_passes,
    refuse=_refuse,
)
