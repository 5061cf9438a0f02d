"""A mesh -> the pipelines, activation checkpointing and ZeRO stages that its plans may have."""

from __future__ import annotations

from math import gcd, inf

from ...cost_models.hardware import Cluster
from ..capture.graph import Kind, ModelGraph
from ..checkpointing import POLICIES, Checkpointing, by_unit, parse_checkpoints, policies_of, refuse_selective
from ..schedules import get_schedule, schedule_names
from ..sharding.mesh import Mesh
from ..sharding.shares import why_even_under
from ..zero import FREED, ZERO_STAGES, Zero, highest, parse_zero, stages_by_unit
from .batch_shares import pinned_shares
from .pins import Pins

Pipeline = tuple[str, int]  # schedule, stages per rank


def num_cuttable(graph: ModelGraph) -> int:
    """Units that a pipeline can cut apart: all but the prelude."""
    return len(graph.units) - 1


def pipelines_for(mesh: Mesh, pins: Pins, pieces: int, zero: Zero = 0) -> list[Pipeline]:
    """The pipelines that can run a model of so many pieces: fewer stages first, then fewer activations where known."""
    found: list[Pipeline] = []
    pinned = pinned_shares(pins.batch_shares, mesh.dp * mesh.microbatches) if pins.batch_shares else None
    counts = {*(pinned or (mesh.microbatches,))}
    for name in schedule_names() if pins.schedule is None else (pins.schedule,):
        schedule = get_schedule(name)
        if pins.schedule is None and mesh.microbatches < schedule.searched_from:
            continue
        for stages in schedule.stages_per_rank if pins.stages_per_rank is None else (pins.stages_per_rank,):
            if stages * mesh.pp > pieces or any(schedule.refuse(mesh.pp, stages, count) for count in counts):
                continue
            if not (pins.is_uneven and why_even_under(highest(zero), stages)):
                found.append((name, stages))

    def kept(pipeline: Pipeline) -> tuple[int, float, str]:
        name, stages = pipeline
        closed_form = get_schedule(name).in_flight if stages == 1 else None
        return stages, inf if closed_form is None else closed_form(0, mesh.pp, mesh.microbatches), name

    return sorted(found, key=kept)


def no_pipeline(mesh: Mesh, pins: Pins) -> str:
    if pins.schedule is None:
        each = f" of {pins.stages_per_rank} stages per rank" if pins.stages_per_rank else ""
        return f"no schedule{each} can run {mesh.microbatches} microbatches on pp={mesh.pp}"
    schedule = get_schedule(pins.schedule)
    tried = schedule.stages_per_rank if pins.stages_per_rank is None else (pins.stages_per_rank,)
    reasons = [reason for stages in tried if (reason := schedule.refuse(mesh.pp, stages, mesh.microbatches))]
    why = reasons[0] if reasons else f"pp={mesh.pp} with {tried[0]} stages per rank needs more pieces than there are"
    return f"schedule {pins.schedule} cannot run on pp={mesh.pp}: {why}"


def checkpoints_for(graph: ModelGraph, pins: Pins) -> tuple[Checkpointing, ...]:
    """What is pinned, or each policy for all blocks.

    Raises:
        AutoparError: a pin names a block that there is not, or a policy that blocks cannot have.
    """
    pinned = pins.activation_checkpoint
    if pinned is None:
        return policies_of(graph)
    where = f"--activation-checkpoint {pinned}"
    if pinned in POLICIES:
        refuse_selective(graph, (pinned,), where=where)
        return (pinned,)
    patterns = parse_checkpoints(pinned, where=where)
    refuse_selective(graph, (*patterns.values(),), where=where)
    return (by_unit(graph, patterns, where=where, default="none"),)


def shardings_for(graph: ModelGraph, mesh: Mesh, pins: Pins, cluster: Cluster) -> tuple[tuple[Zero, int], ...]:
    """(ZeRO stage, replicas): stages 2 and 3 split over all of dp (and cp), or over its ranks of one node.

    Raises:
        AutoparError: a pin names a block that there is not.
    """
    found: list[tuple[Zero, int]] = []
    for zero in (pinned_zero(graph, pins),) if isinstance(pins.zero, str) else zeros_for(mesh, pins):
        if highest(zero) < 2:
            sizes = [mesh.dp] if pins.zero_shard_size is None else []
        elif pins.zero is None and mixed_dtypes(graph):
            sizes = []
        elif pins.zero_shard_size is not None:
            sizes = [pins.zero_shard_size // mesh.cp]
        else:
            near = _near_ranks(mesh, cluster)
            sizes = [mesh.dp, near] if near * mesh.cp > 1 and near < mesh.dp else [mesh.dp]
        found.extend((zero, mesh.dp // size) for size in sizes)
    return tuple(found)


def _near_ranks(mesh: Mesh, cluster: Cluster) -> int:
    """The most consecutive ranks of dp that share a node wherever they begin; all of dp where none do."""
    stride, in_node = mesh.stride("dp"), cluster.common_gpus
    if cluster.num_nodes(mesh.world_size) <= 1 or in_node % stride:
        return mesh.dp
    return gcd(mesh.dp, in_node // stride)


def mixed_dtypes(graph: ModelGraph) -> str:
    """What keeps FSDP2 from sharding the model: which block trains parameters of several dtypes; "" if none does."""
    outside: set[str] = set()
    for template in graph.templates:
        parameters = template.of_kind(Kind.PARAMETER)
        dtypes = {node.output.dtype for node in parameters if node.output.requires_grad}
        if template.is_module and len(dtypes) > 1:
            return f"{template.pattern} trains {' and '.join(sorted(dtypes))}"
        outside |= set() if template.is_module else dtypes
    return f"{' and '.join(sorted(outside))} are trained outside of blocks" if len(outside) > 1 else ""


def pinned_zero(graph: ModelGraph, pins: Pins) -> Zero:
    """The ZeRO stages of the blocks that are pinned.

    Raises:
        AutoparError: the pin names a block that there is not.
    """
    where = f"--zero {pins.zero}"
    stages = parse_zero(str(pins.zero), where=where)
    return stages if isinstance(stages, int) else stages_by_unit(graph, stages, where=where, is_pin=True)


def zeros_for(mesh: Mesh, pins: Pins) -> tuple[int, ...]:
    """ZeRO stages; 3 where blocks have pinned ones of 2 and 3."""
    if pins.zero is not None:
        return (FREED if isinstance(pins.zero, str) else pins.zero,)
    every = ZERO_STAGES if mesh.state_ranks > 1 else (0,)
    return tuple(zero for zero in every if not (pins.is_uneven and why_even_under(zero, 1)))
