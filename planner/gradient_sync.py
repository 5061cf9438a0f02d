"""A plan -> what adding up its gradients takes by each way to do it, over whatever ranks they are added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from ..cost_models.communication import GRADIENT_SYNCS, gradient_sync_seconds, joint_group
from ..cost_models.hardware import cluster_with, cut_to
from ..cost_models.memory import COMPUTE_BYTES
from ..cost_models.units import format_bytes, format_seconds
from .plan import Plan
from .sharding.mesh import Mesh
from .tables import Table

_WORDS = {
    "all_reduce": "all_reduce (ZeRO-0)",
    "reduce_scatter_all_gather": "reduce_scatter, all_gather (ZeRO-1 to 3)",
    "parameter_server": "parameter server: reduce to the owner, broadcast back",
}
# Collectives that add up gradients -> their reasons in a plan.
_ADDING = {
    "all_reduce": ("partial gradients", "fsdp"),
    "reduce_scatter": ("fsdp", "zero1"),
}


def gradient_sync_table(plan: Plan) -> Table:
    """Seconds of every way, once a step and with nothing to hide behind, for each axis of the plan's own collectives
    that add up gradients; of the stage with most bytes there.

    Raises:
        AutoparError: the plan's cluster is not there.
    """
    cluster = cut_to(cluster_with(plan.cluster, plan.cluster_overrides), plan.gpus)
    mesh = Mesh(**plan.mesh, shares=())
    if plan.zero_shard_size:
        mesh = replace(mesh, replicas=mesh.state_ranks // plan.zero_shard_size)
    rows = []
    for axis, num_bytes in _added(plan).items():
        extents = [extent for extent in mesh.extents(axis) if extent[0] > 1]
        group = joint_group(extents, cluster)
        for kind in GRADIENT_SYNCS:
            seconds = gradient_sync_seconds(kind, num_bytes, group, cluster)
            rows.append((f"{axis}={group.size}", _WORDS[kind], format_bytes(num_bytes), format_seconds(seconds)))
    return Table(
        title="Adding up gradients", columns=("over", "way", "gradients", "seconds"), rows=tuple(rows), num_numeric=2
    )


def _added(plan: Plan) -> Mapping[str, float]:
    """Axis -> bytes that one rank adds up over it in a step; plans list them in float32."""
    by_stage: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for use in plan.collectives:
        if use.reason in _ADDING.get(use.op, ()):
            by_stage[use.axis][use.stage] += use.count * use.num_bytes
    ratio = COMPUTE_BYTES[plan.precision] / COMPUTE_BYTES["fp32"]
    return {axis: ratio * max(stages.values()) for axis, stages in sorted(by_stage.items())}
