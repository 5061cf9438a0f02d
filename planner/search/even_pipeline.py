"""A pipeline whose stages all take as long -> how long its step takes.

The bounds of `floors.py` know little of how ranks wait for each other in a schedule. This does, and says what is priced
first and what not at all. That no uneven cut is faster is not proven; none was seen among some thousand plans.

What ranks wait is much the same part of a step where both ranks and microbatches are k times as many: long pipelines
are simulated with fewer of both, a little too fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import gcd

from ...cost_models.timeline import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from ..schedules import get_schedule
from .evaluate import Evaluator
from .pipeline_seconds import simulated_seconds
from .policies import Pipeline
from .stage_cost import StageCost

_STEPS = 50  # of a stage's seconds: so finely are its parts told apart
_ENOUGH_RANKS = 16  # of a simulated pipeline


@dataclass(frozen=True)
class EvenPipelines:
    """Pipelines of one placement on one mesh."""

    evaluator: Evaluator
    _sends: dict[Pipeline, float] = field(default_factory=dict, init=False)

    def passes(self, pipeline: Pipeline, whole: StageCost, busy_seconds: float) -> float:
        """The seconds of a step over `busy_seconds`, those of one microbatch through the whole model: `whole` and what
        runs again."""
        mesh, (name, per_rank) = self.evaluator.mesh, pipeline
        if mesh.pp == 1 or not busy_seconds:
            return mesh.microbatches / mesh.pp
        stages = mesh.pp * per_rank
        parts = whole.forward.total, whole.weights.total, self._send_seconds(pipeline) * stages
        forward, weights, send = (round(_STEPS * part / busy_seconds) for part in parts)
        fewer = _fewer(name, mesh.pp, mesh.microbatches, per_rank)
        ranks, microbatches = mesh.pp // fewer, mesh.microbatches // fewer
        return _steps(name, ranks, microbatches, per_rank, forward, weights, send) / (_STEPS * ranks * per_rank)

    def _send_seconds(self, pipeline: Pipeline) -> float:
        """The mean message of an even cut."""
        if pipeline not in self._sends:
            evaluator, (name, per_rank) = self.evaluator, pipeline
            order, stages, units = get_schedule(name), evaluator.mesh.pp * per_rank, len(evaluator.graph.units)
            ends = [1 + (units - 1) * (stage + 1) // stages for stage in range(stages)]
            cut = tuple(zip((0, *ends), ends, strict=False))
            sends = (evaluator.send_seconds(order, stage, cut) for stage in range(stages - 1))
            self._sends[pipeline] = sum(sends) / (stages - 1)
        return self._sends[pipeline]


@cache
def _fewer(name: str, ranks: int, microbatches: int, per_rank: int) -> int:
    """By what both can be divided."""
    refuse = get_schedule(name).refuse
    common = gcd(max(1, ranks // _ENOUGH_RANKS), microbatches)
    every = (k for k in range(common, 1, -1) if common % k == 0 and ranks % k == 0)
    return next((k for k in every if not refuse(ranks // k, per_rank, microbatches // k)), 1)


@cache
def _steps(name: str, ranks: int, microbatches: int, per_rank: int, forward: int, weights: int, send: int) -> float:
    """A step where every stage takes _STEPS for a microbatch there and back."""
    backward = _STEPS - forward
    durations: dict[tuple[int, str], float] = {}
    for stage in range(ranks * per_rank):
        durations[stage, FORWARD] = forward
        if get_schedule(name).splits_backward:
            # PyTorch leaves the first stage's whole backward to W.
            late = weights if stage else backward
            durations[stage, INPUT_GRADIENT], durations[stage, WEIGHT_GRADIENT] = backward - late, late
        else:
            durations[stage, BACKWARD] = backward
    return simulated_seconds(name, ranks, microbatches, durations, [send] * (ranks * per_rank - 1))


__all__ = ["EvenPipelines"]
