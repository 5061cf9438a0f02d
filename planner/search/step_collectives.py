"""Lowered program + stages + policies -> every collective of one optimizer step, as data: what `verify` holds a run to.

Nothing here is estimated: the counts and payloads are those that PyTorch 2.13 shows when a step of the emitted package
is recorded on gloo ranks. What was measured there, and is relied on:

- FSDP2 as in `fsdp_collectives.py`.
- Non-reentrant checkpointing stops the recomputation once the last saved tensor is there: collectives behind it are not
  repeated. Selective checkpointing keeps the results of kernels, not of collectives: it repeats the same ones.
- Pipeline stages send each output as its own message; its gradient comes back as one, if it has one. Neighbours on one
  rank hand them on. Metadata goes only in the first step.
- Where the backward is split, an operation that takes activations and weights runs its backward twice, its collectives
  included, but on the first stage, which leaves all of it to W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from ..blocks import is_block
from ..capture.graph import ITEM_BYTES, Value
from ..checkpointing import Checkpointing, policy_of
from ..plan import CollectivePlan
from ..schedules import Schedule, get_schedule
from ..sharding.mesh import PARAMETER_AXES, SPLIT_AXES, STATE_AXES, Mesh
from ..sharding.placement import PARTIAL, local_type
from ..sharding.program import Compute, Convert, ModelProgram, TemplateProgram, Var, conversion_uses, var
from ..sharding.redistribute import Change, CollectiveUse
from ..sharding.rules.registry import saved_of
from ..zero import Zero, highest, stage_of
from .fsdp_collectives import fsdp_collectives, gathers_a_step, zero1_collectives
from .held_parameters import HeldParameter, held_parameters, shard_bytes
from .split_backward import run_twice

PRELUDE_UNIT = 0
WORLD, TIED = "world", "tied"


def expected_collectives(
    program: ModelProgram,
    stages: Sequence[tuple[int, int]],
    *,
    zero: Zero,
    schedule: str,
    activation_checkpoint: Checkpointing,
    state_rank: int = 0,
) -> tuple[CollectivePlan, ...]:
    """Every collective of one rank of every pipeline rank in one step with gradient clipping, by kind and payload.

    `stages` are unit ranges [first, last) in the order of the model, placed by the schedule. `state_rank` (where
    the rank is among those that ZeRO splits states over) matters only for the payload of uneven shards, of which rank 0
    has the largest, and for shares of the batch that differ. Payloads are in the graph's dtypes.
    """
    order, ranks = get_schedule(schedule), program.mesh.pp
    microbatches = program.mesh.share(state_rank // program.mesh.cp)
    found: list[CollectivePlan] = []
    for rank in range(ranks):
        mine = order.stages_of(rank, ranks, len(stages))
        counts: Counter[tuple[str, str, int, str]] = Counter()
        for stage in mine:
            splits = order.splits_backward and stage > 0
            for use, reason, count in _passes(
                program, *stages[stage], activation_checkpoint, splits=splits, times=microbatches
            ):
                counts[use.axis, use.op, use.num_bytes, reason] += count
                if use.op == "send":  # between neighbours in a ring: as much comes in
                    counts[use.axis, "recv", use.num_bytes, reason] += count
        for axis, op, num_bytes, reason, count in _once_a_step(program, stages, order, mine, zero, state_rank):
            counts[axis, op, num_bytes, reason] += count
        found.extend(
            CollectivePlan(stage=rank, axis=axis, op=op, count=count, num_bytes=num_bytes, reason=reason)
            for (axis, op, num_bytes, reason), count in sorted(counts.items())
        )
    return tuple(found)


def _passes(
    program: ModelProgram, first: int, last: int, activation_checkpoint: Checkpointing, *, splits: bool, times: int
) -> Iterator[tuple[CollectiveUse, str, int]]:
    """(collective, reason, times a step) of the operations and conversions of a stage.

    `splits`: its backward runs as I and W. `times`: microbatches.
    """
    graph = program.graph
    for use in (*_prelude_uses(program, first, last), *prepared_uses(program, first, last)):
        yield replace(use, phase="step"), "step", 1
    for index in range(max(first, 1), last):
        unit = graph.units[index]
        lowered = program.templates[unit.template]
        for position in range(len(unit.inputs)):
            for change in program.in_microbatch(index, position):
                for use in change.collectives(program.mesh.axis(change.axis)):
                    yield use, use.phase, times
        for use in lowered.collectives():
            yield use, use.phase, times
        for use in run_twice(lowered) if splits else ():
            yield use, use.phase, times
        if policy_of(activation_checkpoint, index) != "none" and lowered.template.is_module:
            for use in recomputed(lowered):
                yield use, "recompute", times


def prepared_changes(program: ModelProgram, first: int, last: int) -> tuple[Change, ...]:
    """The conversions of prelude values that a stage runs once a step; units that want the same share them, and the
    prelude with its own operations."""
    lowered = program.templates[program.graph.units[PRELUDE_UNIT].template]
    own = {step.target for step in _prelude_steps(program, first, last) if isinstance(step, Convert)}
    readers: dict[tuple[int, int, int], int] = {}  # of an output by an input of a template: a unit
    for index in range(max(first, 1), last):
        unit = program.graph.units[index]
        for position, value in enumerate(unit.inputs):
            if value.unit == PRELUDE_UNIT:
                readers.setdefault((value.output, unit.template, position), index)
    found: dict[Var, Change] = {}
    for (output, _, position), index in readers.items():
        made = lowered.outputs[output]
        for change in program.prepared(index, position):
            made = var(made.ref, {**made.layout, change.axis: change.target})
            if made not in own:
                found.setdefault(made, change)
    return tuple(found.values())


def prepared_uses(program: ModelProgram, first: int, last: int) -> Iterator[CollectiveUse]:
    """The collectives of these conversions."""
    for change in prepared_changes(program, first, last):
        yield from change.collectives(program.mesh.axis(change.axis))


def recomputed(lowered: TemplateProgram) -> tuple[CollectiveUse, ...]:
    """The forward collectives that a unit's recomputation repeats: those up to the last step that saves a tensor."""
    uses: list[CollectiveUse] = []
    until = 0
    for step in lowered.steps:
        mine = step.collectives if isinstance(step, Compute) else conversion_uses(step)
        uses.extend(use for use in mine if use.phase == "forward")
        if isinstance(step, Compute) and saves(step):
            until = len(uses)
    return tuple(uses[:until])


def saves(step: Compute) -> bool:
    """Whether autograd keeps something of an operation."""
    if not any(value.requires_grad for value in step.outputs):
        return False
    saved = saved_of(step.node, step.operand_types)
    return bool(saved.operands or saved.outputs or saved.extra_bytes)


def _prelude_uses(program: ModelProgram, first: int, last: int) -> Iterator[CollectiveUse]:
    """Collectives of the part of the prelude that a stage needs."""
    for step in _prelude_steps(program, first, last):
        yield from step.collectives if isinstance(step, Compute) else conversion_uses(step)


def _prelude_steps(program: ModelProgram, first: int, last: int) -> Sequence[Convert | Compute]:
    """The part of the prelude that a stage needs, dead code left out."""
    graph = program.graph
    lowered = program.templates[graph.units[PRELUDE_UNIT].template]
    wanted = {
        lowered.template.outputs[value.output]
        for index in range(max(first, 1), last)
        for value in graph.units[index].inputs
        if value.unit == PRELUDE_UNIT
    }
    if graph.loss.unit == PRELUDE_UNIT:
        wanted.add(lowered.template.outputs[graph.loss.output])
    # A conversion is needed if a later step reads its target, an operation if any of its results is read.
    targets = {var for var in lowered.outputs if var.ref in wanted}
    needed: list[Convert | Compute] = []
    for step in reversed(lowered.steps):
        if isinstance(step, Convert):
            if step.target in targets:
                targets.add(step.source)
                needed.append(step)
        elif any(result in targets for result in step.results):
            targets.update(step.operands)
            needed.append(step)
    return needed[::-1]


def stage_values(program: ModelProgram, boundary: int) -> tuple[Value, ...]:
    """The values that cross the pipeline edge before unit `boundary`: made before, read behind; of the prelude none."""
    graph = program.graph
    read = {
        value
        for unit in graph.units[boundary:]
        for value in unit.inputs
        if PRELUDE_UNIT < value.unit < boundary
    }  # fmt: skip
    return tuple(sorted(read, key=lambda value: (value.unit, value.output)))


def _messages(program: ModelProgram, boundary: int) -> Iterator[tuple[int, bool]]:
    """(bytes, has a gradient) of each value on a pipeline edge, in one microbatch."""
    graph, axes = program.graph, program.mesh.axes
    for value in stage_values(program, boundary):
        layout = program.templates[graph.units[value.unit].template].outputs[value.output].layout
        local = local_type(graph.type_of(value), layout, axes)
        yield local.num_bytes, local.requires_grad


def _once_a_step(
    program: ModelProgram,
    stages: Sequence[tuple[int, int]],
    order: Schedule,
    mine: Sequence[int],
    zero_of: Zero,
    state_rank: int,
) -> Iterator[tuple[str, str, int, str, int]]:
    """(axis, op, bytes, reason, count) of pipeline messages, parameters, loss and clipping of one rank's stages."""
    graph, mesh, zero = program.graph, program.mesh, highest(zero_of)
    microbatches = mesh.share(state_rank // mesh.cp)
    for stage in mine:
        for neighbour, boundary in ((stage - 1, stages[stage][0]), (stage + 1, stages[stage][1])):
            if neighbour in mine or not 0 <= neighbour < len(stages):
                continue
            value, gradient = ("recv", "send") if neighbour < stage else ("send", "recv")
            for num_bytes, has_gradient in _messages(program, boundary):
                yield "pp", value, num_bytes, "stage", microbatches
                if has_gradient:
                    yield "pp", gradient, num_bytes, "stage", microbatches

    held = {stage: held_parameters(program, *stages[stage]) for stage in range(len(stages))}
    shards = mesh.shards if zero >= 2 else 1
    shard_rank = state_rank % mesh.shards if zero >= 2 else state_rank
    if zero == 1 and mesh.state_ranks > 1:
        for op, num_bytes, count in zero1_collectives([p for stage in mine for p in held[stage]], mesh.state_ranks):
            yield mesh.state_axis, op, num_bytes, "zero1", count
    elif shards > 1:
        for stage in mine:
            gathers = _gathers(program, order, stage, len(mine), microbatches, zero_of)
            found = fsdp_collectives(held[stage], mesh, gathers)
            yield from ((axis, op, num_bytes, "fsdp", count) for axis, op, num_bytes, count in found)
    trainable = [parameter for stage in mine for parameter in held[stage] if parameter.trainable]
    every = [parameter.partial for theirs in held.values() for parameter in theirs if parameter.trainable]
    for name in reduced_over(mesh, zero, every):
        partial = [parameter for parameter in trainable if is_partial(parameter.partial, name)]
        yield from _bucket(name, partial, shards, shard_rank)
    elsewhere = {parameter.fqn for stage, theirs in held.items() if stage not in mine for parameter in theirs}
    for parameter in {parameter.fqn: parameter for parameter in trainable}.values():
        if parameter.fqn in elsewhere:
            split = mesh.shards if zero >= 1 else 1
            yield TIED, "all_reduce", shard_bytes(parameter, split, shard_rank, zero), "tied", 1
    for axis in loss_axes(program):
        yield axis, "all_reduce", ITEM_BYTES[graph.type_of(graph.loss).dtype], "loss", 1
    if mesh.world_size > 1:
        dtypes = {parameter.dtype for each in held.values() for parameter in each}
        norm = "float64" if dtypes & {"float64", "complex128"} else "float32"
        yield WORLD, "all_reduce", ITEM_BYTES[norm], "clip", 1


def _gathers(
    program: ModelProgram, order: Schedule, stage: int, stages_per_rank: int, microbatches: int, zero: Zero
) -> dict[str, int]:
    """How often a stage gathers the parameters of each block, and of the root, "": as of a block if there is none."""
    graph, mesh = program.graph, program.mesh

    def times(each: int) -> tuple[int, int]:
        return gathers_a_step(order.name, mesh.pp, microbatches, stages_per_rank, stage, each)

    blocks = {unit.fqn: stage_of(zero, index) for index, unit in enumerate(graph.units) if is_block(graph, index)}
    return {**{fqn: times(each)[0] for fqn, each in blocks.items()}, "": times(highest(zero))[bool(blocks)]}


def reduced_axes(zero: int) -> tuple[str, ...]:
    """Axes whose partial gradients are added up in a bucket after the last microbatch; over others ZeRO scatters."""
    return SPLIT_AXES if zero == 0 else PARAMETER_AXES


def reduced_over(mesh: Mesh, zero: int, partial: Sequence[Collection[str]]) -> tuple[str, ...]:
    """What these buckets are added up over, one after the other: an axis, or dp and cp together where every gradient is
    a partial sum on both. `partial`: the axes of each parameter that has a gradient."""
    axes = [axis for axis in reduced_axes(zero) if mesh.sizes[axis] > 1 and any(axis in each for each in partial)]
    if set(STATE_AXES) <= set(axes) and all(is_partial(each, mesh.state_axis) for each in partial):
        return (mesh.state_axis, *(axis for axis in axes if axis not in STATE_AXES))
    return tuple(axes)


def is_partial(partial: Collection[str], name: str) -> bool:
    """Whether a gradient is a partial sum over an axis, or over both of "dp_cp"."""
    return all(axis in partial for axis in name.split("_"))


def loss_axes(program: ModelProgram) -> tuple[str, ...]:
    """The axes over which the ranks add up their parts of the loss, one after the other; "world" for all at once.

    Over pp it goes from the last stage to the others, which have zero.
    """
    graph, sizes = program.graph, program.mesh.sizes
    layout = program.templates[graph.units[graph.loss.unit].template].outputs[graph.loss.output].layout
    axes = [axis for axis in SPLIT_AXES if sizes[axis] > 1 and layout.get(axis) == PARTIAL]
    axes += ["pp"] if sizes["pp"] > 1 else []
    return (WORLD,) if len(axes) > 1 and len(axes) == sum(size > 1 for size in sizes.values()) else tuple(axes)


def _bucket(
    axis: str, parameters: Sequence[HeldParameter], shards: int, shard_rank: int
) -> Iterator[tuple[str, str, int, str, int]]:
    """One all_reduce for all parameters of one dtype."""
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += shard_bytes(parameter, shards, shard_rank)
    for num_bytes in sizes.values():
        yield axis, "all_reduce", num_bytes, "partial gradients", 1


__all__ = [
    "expected_collectives", "is_partial", "loss_axes", "prepared_changes", "prepared_uses", "recomputed",
    "reduced_axes", "reduced_over", "saves", "stage_values",
]  # fmt: skip
