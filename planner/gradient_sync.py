"""A plan -> what adding up its gradients over dp takes by each way to do it, as a table."""

from __future__ import annotations

from math import prod

from ..cost_models.communication import GRADIENT_SYNCS, axis_group, gradient_sync_seconds
from ..cost_models.hardware import cluster_with
from ..cost_models.memory import COMPUTE_BYTES
from ..cost_models.units import format_bytes, format_seconds
from .plan import Plan
from .tables import Table

_WORDS = {
    "all_reduce": "all_reduce (ZeRO-0)",
    "reduce_scatter_all_gather": "reduce_scatter, all_gather (ZeRO-1 to 3)",
    "parameter_server": "parameter server: reduce to the owner, broadcast back",
}


def gradient_sync_table(plan: Plan) -> Table:
    """Seconds of every way for the stage with most parameters, once a step, with nothing to hide behind.

    Raises:
        AutoparError: the plan's cluster is not there.
    """
    cluster = cluster_with(plan.cluster, plan.cluster_overrides)
    dp = plan.mesh.get("dp", 1)
    num_bytes = max(stage.num_parameters for stage in plan.stages) * COMPUTE_BYTES[plan.precision]
    inner = prod(size for axis, size in plan.mesh.items() if axis not in ("pp", "dp"))
    rows = []
    if dp > 1:
        group = axis_group(dp, inner, cluster)
        for kind in GRADIENT_SYNCS:
            rows.append((_WORDS[kind], format_seconds(gradient_sync_seconds(kind, num_bytes, group, cluster))))
    title = f"Adding up {format_bytes(num_bytes)} of gradients over dp={dp}"
    return Table(title=title, columns=("way", "seconds"), rows=tuple(rows), num_numeric=1)
