"""Placements on a mesh and a policy -> the seconds that no cut is faster than, and the bytes that no cut does with.

Whatever the cut, the stages' passes of one microbatch add up to those of the whole model, and so do, at least, their
optimizers, the exchanges of their gradients and what they hold: the slowest and the fullest rank have a rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import inf
from typing import NamedTuple

from ..checkpointing import Checkpointing
from ..schedules import alive_at_most, get_schedule, stages_by_rank
from ..zero import Zero, highest
from .evaluate import Evaluator
from .even_pipeline import EvenPipelines
from .least_recompute import least_recomputed
from .mesh_bounds import fewest_passes
from .policies import Pipeline
from .prices import slowest_of_nodes
from .stage_cost import StageCost
from .stages_ilp import least_fullest

_ROUNDING = 1e-12  # of sums of seconds


def floor_seconds(evaluator: Evaluator, pipeline: Pipeline, zero: Zero, recompute: Checkpointing) -> float:
    """No cut of these placements under this policy gives a faster step; without a pipeline it is the step."""
    whole = evaluator.costs.whole(zero, recompute)
    passes = fewest_passes(evaluator.mesh, (pipeline,))
    return _step_seconds(evaluator, pipeline, zero, whole, whole.busy_seconds, passes)


class Fitting(NamedTuple):
    """Seconds of a step that fits in memory: none takes less than `least`, nor likely less than `likely`."""

    least: float
    likely: float


def fitting_seconds(
    even: EvenPipelines,
    evaluator: Evaluator,
    pipeline: Pipeline,
    zero: Zero,
    policies: Sequence[Checkpointing],
    room_bytes: Sequence[float],
    known_seconds: float = inf,
) -> Fitting:
    """Of every cut, whatever of `policies` each block has; inf where none fits.

    `room_bytes`: by pipeline rank. What takes `known_seconds` or more is not looked at further.
    """
    mesh, (name, per_rank) = evaluator.mesh, pipeline
    plain, full = (evaluator.costs.whole(zero, policy) for policy in (policies[0], policies[-1]))

    def likely(busy_seconds: float) -> float:
        passes = even.passes(pipeline, plain, busy_seconds)
        return _step_seconds(evaluator, pipeline, zero, full, busy_seconds, passes)

    # The longer the backward, the more of what runs beside it is hidden.
    floor = partial(_step_seconds, evaluator, pipeline, zero, full, passes=fewest_passes(mesh, (pipeline,)))
    if (soonest := likely(plain.busy_seconds)) >= known_seconds:
        return Fitting(floor(plain.busy_seconds), soonest)
    units = evaluator.least_units.recomputed(highest(zero), tuple(policies))
    least = least_recomputed(
        units,
        alive=alive_at_most(name, mesh.pp, mesh.microbatches, per_rank),
        by_rank=stages_by_rank(name, mesh.pp, mesh.pp * per_rank),
        room_bytes=[size - evaluator.prices.cluster.gpu.overhead_bytes for size in room_bytes],
    )
    if least == inf:
        return Fitting(inf, inf)
    busy = plain.busy_seconds + least - sum(count * unit.seconds[0] for unit, count in units.items())
    found = floor(busy)
    return Fitting(found, found if found >= known_seconds else max(found, likely(busy)))


def _step_seconds(
    evaluator: Evaluator, pipeline: Pipeline, zero: Zero, whole: StageCost, busy_seconds: float, passes: float
) -> float:
    """A step at least, of a model that computes for `busy_seconds` a microbatch and does what `whole` does once.

    `passes`: microbatches, of which a step takes as long as so many one after the other.
    """
    mesh, prices = evaluator.mesh, evaluator.prices
    after = whole.step_seconds
    if mesh.pp > 1:
        # What hides behind compute does not add up, nor need measured curves: two messages may be faster than one.
        is_exposed = (
            highest(zero) <= 1 and prices.stack.gradient_sync == "exposed" and not prices.cluster.intra_node.measured
        )
        after = (whole.step["optimizer"] + (whole.step["dp"] if is_exposed else 0.0)) / mesh.pp
    return (_started(evaluator) + busy_seconds * passes + after) * _slower(evaluator)


def cut_seconds(
    evaluator: Evaluator, stages: Sequence[tuple[int, int]], schedule: str, recompute: Checkpointing
) -> float:
    """This cut gives no faster step, under this policy or with more blocks that run again.

    A rank waits for the first microbatch to come through the stages before its own, works on every microbatch, and
    waits for the last to go back, unless it still has gradients of weights to work on.
    """
    mesh = evaluator.mesh
    courses = _courses(evaluator, stages, schedule, recompute)
    slowest = max(course.waiting_seconds + mesh.microbatches * course.busy_seconds for course in courses)
    return (_started(evaluator) + slowest) * _slower(evaluator)


def spare_seconds(
    evaluator: Evaluator, stages: Sequence[tuple[int, int]], schedule: str, known_seconds: float
) -> tuple[float, ...]:
    """By rank what may be added to its part of a microbatch for `cut_seconds` without recomputation to stay below
    `known_seconds`."""
    room = known_seconds / _slower(evaluator) - _started(evaluator)
    return tuple(
        (room - course.waiting_seconds) / evaluator.mesh.microbatches - course.busy_seconds
        for course in _courses(evaluator, stages, schedule, "none")
    )


class _Course(NamedTuple):
    """Of a rank: how long it waits for its first microbatch, and what each takes."""

    waiting_seconds: float
    busy_seconds: float


def _courses(
    evaluator: Evaluator, stages: Sequence[tuple[int, int]], schedule: str, recompute: Checkpointing
) -> list[_Course]:
    mesh, order = evaluator.mesh, get_schedule(schedule)
    through = (0.0, *accumulate(evaluator.costs.unit_seconds(recompute).through))
    ahead = (0.0, *accumulate(evaluator.costs.unit_seconds("none").forward))
    before = ahead if order.splits_backward else through
    busy = [0.0] * mesh.pp
    waiting = [inf] * mesh.pp
    for stage, (first, last) in enumerate(stages):
        rank = order.rank_of(stage, mesh.pp)
        busy[rank] += through[last - 1] - through[max(first, 1) - 1]
        waiting[rank] = min(waiting[rank], before[max(first, 1) - 1])
    return list(map(_Course, waiting, busy))


def _started(evaluator: Evaluator) -> float:
    return evaluator.prices.cluster.gpu.pipeline_step_seconds if evaluator.mesh.pp > 1 else 0.0


def _slower(evaluator: Evaluator) -> float:
    return slowest_of_nodes(evaluator.mesh, evaluator.prices.cluster) * (1 - _ROUNDING)


def floor_bytes(evaluator: Evaluator, pipeline: Pipeline, zero: Zero, recompute: Checkpointing) -> float:
    """No cut of these placements under this policy leaves every rank with less."""
    mesh, (name, per_rank) = evaluator.mesh, pipeline
    least = least_fullest(
        evaluator.least_units.counts(highest(zero), recompute),
        alive=alive_at_most(name, mesh.pp, mesh.microbatches, per_rank),
        by_rank=stages_by_rank(name, mesh.pp, mesh.pp * per_rank),
    )
    return least + evaluator.prices.cluster.gpu.overhead_bytes
