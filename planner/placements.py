"""Plan + graph -> placements and local programs, checked: what the compiler reads. Needs no solver."""

from __future__ import annotations

from ..cost_models.errors import AutoparError
from .capture.graph import Kind, ModelGraph, Node, Template
from .checkpointing import Checkpointing, by_unit
from .errors import CannotLower, UnsupportedModel
from .plan import Plan
from .sharding.mesh import AXES, MICROBATCH, SPLIT_AXES, STATE_AXES, Mesh, refuse_shares, splits_states
from .sharding.placement import REPLICATED, SUMMED_GRADIENT, Layout, parse_pair
from .sharding.program import ModelProgram, Placements, model_program, node_layouts, option_named
from .sharding.shares import why_even, why_even_under
from .zero import Zero, stages_by_unit

_WHERE = "placements of the plan"


def mesh_of(plan: Plan) -> Mesh:
    """The mesh of a plan, microbatches included.

    Raises:
        AutoparError: an unknown axis, or a size below one.
    """
    for name, size in plan.mesh.items():
        if name not in AXES or size < 1:
            fix = f"use {', '.join(AXES)} >= 1"
            raise AutoparError(f"mesh axis {name}={size} is none", where="mesh of the plan", fix=fix)
    dp, cp = plan.mesh.get("dp", 1), plan.mesh.get("cp", 1)
    shards = plan.zero_shard_size or dp * cp
    if not splits_states(shards, dp, cp) or (shards < dp * cp and plan.zero < 2):
        beside = f", cp={cp}" if cp > 1 else ""
        raise AutoparError(
            f"ZeRO-{plan.zero} cannot split over {shards} of dp={dp}{beside} ranks",
            where="zero_shard_size of the plan",
            fix="use a divisor of dp, times cp, with zero 2 or 3, or leave it out",
        )
    if plan.batch_shares and (reason := refuse_shares(plan.batch_shares, dp, plan.microbatches)):
        raise AutoparError(
            f"batch shares {', '.join(map(str, plan.batch_shares))}: {reason}",
            where="batch_shares of the plan",
            fix="write the microbatches of each dp rank, whose mean is microbatches, or leave them out",
        )
    return Mesh(
        **plan.mesh, microbatches=plan.microbatches, replicas=dp * cp // shards, shares=tuple(plan.batch_shares)
    )


def placements_of(plan: Plan, graph: ModelGraph) -> Placements:
    """The plan's placements, aligned with the graph's templates; names, labels and splits are checked.

    Raises:
        AutoparError: an unknown template, node, axis or label, or a split that does not divide; it is named.
    """
    mesh = mesh_of(plan)
    by_name = {template.name: template for template in graph.templates}
    for name in plan.placements:
        if name not in by_name:
            raise AutoparError(f"there is no template {name!r}", where=_WHERE, fix=f"one of: {', '.join(by_name)}")
    for name, placement in plan.placements.items():
        template = by_name[name]
        for node_name, chosen in placement.items():
            node = template.by_name.get(node_name)
            if node is None:
                raise AutoparError(f"{name} has no node {node_name!r}", where=_WHERE, fix="plan the model again")
            for axis, label in chosen.items():
                _check_label(mesh, template, node, axis, label)
    found = tuple(dict(plan.placements.get(template.name, {})) for template in graph.templates)
    for template, placement in zip(graph.templates, found, strict=True):
        for node in template.nodes:
            try:
                _, (layout, *_) = node_layouts(template, node, placement, mesh.axes)
            except CannotLower as error:
                raise AutoparError(
                    str(error),
                    where=f"placements of {template.name}",
                    fix="choose another placement for this node, or another mesh",
                ) from None
            if plan.zero and node.kind is Kind.PARAMETER and node.output.requires_grad:
                _check_is_summed(template, node, layout)
    _check_inputs(graph, found, mesh)
    return found


def checkpointing_of(plan: Plan, graph: ModelGraph) -> Checkpointing:
    """What of the graph's blocks the backward computes again.

    Raises:
        AutoparError: the plan names a block that there is not, or leaves one out.
    """
    if not plan.checkpoint_by_block:
        return plan.activation_checkpoint
    return by_unit(graph, plan.checkpoint_by_block, where="plan.json: checkpoint_by_block")


def zero_of(plan: Plan, graph: ModelGraph) -> Zero:
    """The ZeRO stage of the graph's blocks.

    Raises:
        AutoparError: the plan names a block that there is not, or leaves one out.
    """
    return (
        stages_by_unit(graph, plan.zero_by_block, where="plan.json: zero_by_block") if plan.zero_by_block else plan.zero
    )


def _check_is_summed(template: Template, node: Node, layout: Layout) -> None:
    """Refuse a parameter whose gradient ZeRO would add up though it is whole on every rank."""
    for axis in STATE_AXES:
        if layout.get(axis, SUMMED_GRADIENT) == REPLICATED:
            raise AutoparError(
                f"{node.name} is R on {axis}: its gradient is whole on every rank, and ZeRO adds up what ranks have",
                where=f"{template.name}: {node.name}",
                fix=f'write "{axis}": "{SUMMED_GRADIENT}", a part of the gradient on every rank, or "zero": 0',
            )


def _check_inputs(graph: ModelGraph, placements: Placements, mesh: Mesh) -> None:
    """Refuse model inputs placed otherwise than ranks get them: the samples of their dp coordinate."""
    prelude = graph.units[0].template
    nodes = graph.templates[prelude].of_kind(Kind.INPUT)
    for node, given in zip(nodes, graph.inputs, strict=True):
        chosen = placements[prelude].get(node.name, {})
        for axis in mesh.axes:
            label = chosen.get(axis.name, str(REPLICATED))
            wanted = REPLICATED if axis.name != "dp" or given.batch_dim is None else parse_pair(f"S({given.batch_dim})")
            if parse_pair(label) != wanted:
                raise AutoparError(
                    f"the input {given.name} is {label} on {axis.name}, and ranks get it as {wanted}",
                    where=f"{graph.templates[prelude].name}: {node.name}",
                    fix=f"leave {axis.name} out of it" if wanted == REPLICATED else f'write "{axis.name}": "{wanted}"',
                )


def _check_label(mesh: Mesh, template: Template, node: Node, axis: str, label: str) -> None:
    where = f"{template.name}: {node.name}"
    if axis not in (*SPLIT_AXES, MICROBATCH):
        fix = f"use {', '.join(SPLIT_AXES)} or {MICROBATCH}"
        raise AutoparError(f"there is no axis {axis!r} to split over", where=where, fix=fix)
    try:
        if node.kind is Kind.OP:
            option_named(node, [template.type_of(ref) for ref in node.operands], label)
            return
        pair = parse_pair(label)
    except (KeyError, ValueError) as error:
        raise AutoparError(str(error.args[0]), where=where, fix="choose one of those") from None
    if pair.is_split and pair.dim >= len(node.output.shape):
        raise AutoparError(f"{label} splits a dim that shape {node.output.shape} lacks", where=where)


def program_of(plan: Plan, graph: ModelGraph) -> ModelProgram:
    """The local programs that the plan describes.

    Raises:
        AutoparError: as `placements_of`, a conversion that does not exist, or shares of the batch that cannot differ.
    """
    placements = placements_of(plan, graph)
    try:
        program = model_program(graph, placements, mesh_of(plan))
        for index, unit in enumerate(graph.units):
            for position in range(len(unit.inputs)):
                program.edge(index, position)
    except CannotLower as error:
        raise UnsupportedModel(
            f"these placements cannot be lowered: {error}", where=_WHERE, fix="undo the edit, or plan again"
        ) from None
    if program.mesh.shares and (reason := why_even_under(plan.zero, plan.stages_per_rank) or why_even(program)):
        raise AutoparError(
            f"dp ranks cannot take different numbers of microbatches: {reason}",
            where="batch_shares of the plan",
            fix="leave batch_shares out: all dp ranks then take as many",
        )
    return program
