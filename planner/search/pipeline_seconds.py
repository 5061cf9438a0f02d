"""What stages take -> the actions of a pipeline schedule, and its seconds by simulating them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...cost_models.hardware import Gpu
from ...cost_models.stacks import Stack
from ...cost_models.timeline import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, schedule_seconds
from ..schedules import Schedule, action_table
from .stage_cost import StageCost

# A pipeline repeats itself after so many microbatches per rank, with a period of at most so many more. Within 2e-4 of
# the whole simulation on random durations.
_SETTLED_ROUNDS, _REPEATED_ROUNDS = 8, 4


def action_seconds(
    cost: StageCost, order: Schedule, gpu: Gpu, *, is_first: bool, is_pipeline: bool
) -> dict[str, float]:
    """Each action of a microbatch, by kind: the device's, or the host's with what the schedule takes of it."""
    action = gpu.pipeline_action_seconds if is_pipeline else 0.0

    def longer(device: float, host: float) -> float:
        return device + action if gpu.is_host else max(device, host + action)

    whole, host = cost.backward.total, cost.host_backward
    ahead = longer(cost.forward.total, cost.host_forward)
    if not order.splits_backward:
        return {FORWARD: ahead, BACKWARD: longer(whole, host)}
    # PyTorch leaves the first stage's whole backward to W: it has no input whose gradient anyone waits for.
    weights = whole if is_first else cost.weights.total
    share = weights / whole if whole else 1.0
    return {
        FORWARD: ahead,
        INPUT_GRADIENT: longer(whole - weights, host * (1 - share)),
        WEIGHT_GRADIENT: longer(weights, host * share),
    }


def pipeline_seconds(
    costs: Sequence[StageCost], order: Schedule, stack: Stack, *, ranks: int, microbatches: int
) -> float:
    """From the first action to the last. `costs`: of the stages, in the order of the model."""
    durations = {(s, kind): seconds for s, cost in enumerate(costs) for kind, seconds in cost.action_seconds.items()}
    sends = [cost.send_seconds for cost in costs[:-1]]
    if len(costs) > ranks and stack.interleaved_messages == "waited for":
        # They are sent and received in one call that both sides wait for.
        backward = INPUT_GRADIENT if order.splits_backward else BACKWARD
        for s, seconds in enumerate(sends):
            durations[s, FORWARD] += seconds
            durations[s + 1, backward] += seconds
        sends = [0.0] * len(sends)
    return simulated_seconds(order.name, ranks, microbatches, durations, sends)


def simulated_seconds(
    schedule: str, ranks: int, microbatches: int, durations: Mapping[tuple[int, str], float], sends: Sequence[float]
) -> float:
    """Seconds of a schedule. Far beyond warm-up every further microbatch takes as long as the one before."""
    per_rank = (len(sends) + 1) // ranks
    settled, repeated = _SETTLED_ROUNDS * ranks, _REPEATED_ROUNDS * ranks

    def seconds(count: int) -> float:
        return schedule_seconds(action_table(schedule, ranks, count, per_rank), durations, sends)

    if ranks == 1:
        return microbatches * seconds(1)
    if microbatches <= settled + repeated:
        return seconds(microbatches)
    before = seconds(settled)
    return before + (microbatches - settled) * (seconds(settled + repeated) - before) / repeated
