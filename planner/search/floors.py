"""Placements on a mesh and a policy -> the seconds that no cut is faster than, and the bytes that no cut does with.

Whatever the cut, the stages' passes of one microbatch add up to those of the whole model, and so do, at least, their
optimizers, the exchanges of their gradients and what they hold: the slowest and the fullest rank have a rank's share.
"""

from __future__ import annotations

from ..checkpointing import Checkpointing
from ..schedules import in_flight, stages_by_rank
from ..zero import Zero, highest
from .candidates import Pipeline, always_fills, pipeline_factor
from .evaluate import Evaluator
from .prices import slowest_of_nodes
from .stages_ilp import least_fullest

_ROUNDING = 1e-12  # of sums of seconds


def floor_seconds(evaluator: Evaluator, pipeline: Pipeline, zero: Zero, recompute: Checkpointing) -> float:
    """No cut of these placements under this policy gives a faster step; without a pipeline it is the step."""
    mesh, prices = evaluator.mesh, evaluator.prices
    whole = evaluator.costs.whole(zero, recompute)
    after = whole.step_seconds
    started = 0.0
    if mesh.pp > 1:
        started = prices.cluster.gpu.pipeline_step_seconds
        # What hides behind compute does not add up, nor need measured curves: two messages may be faster than one.
        is_exposed = (
            highest(zero) <= 1 and prices.stack.gradient_sync == "exposed" and not prices.cluster.intra_node.measured
        )
        after = (whole.step["optimizer"] + (whole.step["dp"] if is_exposed else 0.0)) / mesh.pp
    through = whole.busy_seconds * pipeline_factor(mesh, fills=always_fills((pipeline,)))
    return (started + through + after) * slowest_of_nodes(mesh, prices.cluster) * (1 - _ROUNDING)


def floor_bytes(evaluator: Evaluator, pipeline: Pipeline, zero: Zero, recompute: Checkpointing) -> float:
    """No cut of these placements under this policy leaves every rank with less."""
    mesh, (name, per_rank) = evaluator.mesh, pipeline
    least = least_fullest(
        evaluator.costs.least_units(highest(zero), recompute),
        in_flight=in_flight(name, mesh.pp, mesh.microbatches, per_rank),
        by_rank=stages_by_rank(name, mesh.pp, mesh.pp * per_rank),
    )
    return least + evaluator.prices.cluster.gpu.overhead_bytes
