"""Lowered program + stages + policies -> every collective of one optimizer step, as data: what `verify` holds a run to.

Nothing here is estimated: the counts and payloads are those that PyTorch 2.13 shows when a step of the emitted package
is recorded on gloo ranks. What was measured there, and is relied on:

- FSDP2 gathers one flat buffer per module; every parameter's dim 0 is padded to a multiple of the axis. Gradients are
  reduce-scattered once a step, in the same layout, without the frozen parameters.
- With reshard_after_forward=False (ZeRO-2) and gradients accumulated, a module is gathered once a step.
- With reshard_after_forward=True (ZeRO-3) each forward and each backward gathers, except where the backward before has
  kept the parameters: pipeline schedules (and the emitted loop) reshard only after the last backward. A gather happens
  at each forward that follows no backward, and at the first of consecutive backwards: microbatches + 1 a step, both
  for GPipe and 1F1B.
- The root, what lies outside the blocks, is not resharded after a forward where there are blocks: gathered once a step.
- A recomputation under FSDP gathers nothing more: the hook before the backward has already gathered.
- Non-reentrant checkpointing stops the recomputation once the last saved tensor is there: collectives behind it are not
  repeated. Selective checkpointing keeps the results of kernels, not of collectives: it repeats the same ones.
- Pipeline stages send each output as its own message; its gradient comes back as one, if it has one. Metadata goes only
  in the first step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..capture.graph import ITEM_BYTES, Kind, TensorType, Value
from ..plan import CollectivePlan
from ..sharding.mesh import PARAMETER_AXES, SPLIT_AXES, Mesh
from ..sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout, local_type
from ..sharding.program import Compute, Convert, ModelProgram, TemplateProgram, conversion_uses
from ..sharding.redistribute import Change, CollectiveUse
from ..sharding.rules.registry import saved_of

PRELUDE_UNIT = 0
WORLD, TIED = "world", "tied"
# Axes whose partial gradients are added up after the last microbatch, whatever the ZeRO stage.
REDUCED_AXES = ("ep", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldParameter:
    """A parameter of one stage as one rank holds it on ep and tp, before data parallelism shards it.

    `shape`: the local shape; a split in groups is held with the groups as a dim of their own. `trainable`: a
    gradient reaches it. `partial`: axes on which that is a partial sum. `group`: FQN of the block it is sharded with
    under ZeRO, "" for the root. `split_dims`: those of `shape` that ep and tp split.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    partial: frozenset[str]
    group: str
    split_dims: frozenset[int] = frozenset()

    def dp_dim(self, zero: int) -> int | None:
        """The dim that dp splits: FSDP2 takes the first, ZeRO-1 the first that is whole; None without one."""
        taken = self.split_dims if zero == 1 else ()
        return next((dim for dim in range(len(self.shape)) if dim not in taken), None)


def held_shape(value: TensorType, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """Local shape of a parameter; S(dim; groups) is held as a plain split of (..., groups, rest, ...)."""
    sizes = list(value.shape)
    groups_of: dict[int, int] = {}
    for name in PARAMETER_AXES:
        pair = layout.get(name, REPLICATED)
        if pair.is_split:
            sizes[pair.dim] //= mesh.sizes[name]
            groups_of[pair.dim] = max(pair.groups, groups_of.get(pair.dim, 1))
    shape: list[int] = []
    for dim, size in enumerate(sizes):
        groups = groups_of.get(dim, 1)
        shape += [size] if groups == 1 else [groups, size // groups]
    return tuple(shape)


def held_dims(layout: Layout) -> frozenset[int]:
    """The dims of the held shape that ep and tp split."""
    pairs = [pair for name in PARAMETER_AXES if (pair := layout.get(name, REPLICATED)).is_split]
    fused = next((pair.dim for pair in pairs if pair.groups > 1), None)
    return frozenset(pair.dim + (fused is not None and pair.dim >= fused) for pair in pairs)


def held_parameters(program: ModelProgram, first: int, last: int) -> tuple[HeldParameter, ...]:
    """The parameters of a stage, each once, in order of first use; the first stage also holds the unused ones."""
    graph = program.graph
    found: dict[str, HeldParameter] = {}
    parameters: dict[int, list[tuple[str, HeldParameter]]] = {}
    for index in range(max(first, 1), last):
        unit = graph.units[index]
        if unit.template not in parameters:
            parameters[unit.template] = _parameters_of(program, unit.template)
        fqns = dict(unit.tensors)
        is_module = graph.templates[unit.template].is_module
        for name, alike in parameters[unit.template]:
            fqn = fqns[name]
            before = found.get(fqn)
            found[fqn] = HeldParameter(
                fqn=fqn,
                shape=alike.shape,
                dtype=alike.dtype,
                trainable=alike.trainable,
                partial=alike.partial | before.partial if before else alike.partial,
                group=(unit.fqn if is_module else "") if before is None else before.group,
                split_dims=alike.split_dims,
            )
    if first <= 1:
        used = {fqn for unit in graph.units for _, fqn in unit.tensors}
        for fqn, info in graph.tensors.items():
            if fqn not in used and not info.is_buffer:
                found[fqn] = HeldParameter(
                    fqn=fqn,
                    shape=info.type.shape,
                    dtype=info.type.dtype,
                    trainable=False,
                    partial=frozenset(),
                    group="",
                )
    return tuple(found.values())


def _parameters_of(program: ModelProgram, template: int) -> list[tuple[str, HeldParameter]]:
    """PARAMETER nodes of a template with what its units hold of each; without FQN and group."""
    lowered = program.templates[template]
    found: list[tuple[str, HeldParameter]] = []
    for held in lowered.tensors:
        node = lowered.template.by_name[held.ref.node]
        if node.kind is not Kind.PARAMETER:
            continue
        layout = held.layout
        partial = frozenset(a for a in SPLIT_AXES if layout.get(a) == SUMMED_GRADIENT and node.output.requires_grad)
        alike = HeldParameter(
            fqn="",
            shape=held_shape(node.output, layout, program.mesh),
            dtype=node.output.dtype,
            trainable=node.output.requires_grad,
            partial=partial,
            group="",
            split_dims=held_dims(layout),
        )
        found.append((node.name, alike))
    return found


def parameter_bytes(held: HeldParameter) -> int:
    """Bytes on one rank of tp."""
    return prod(held.shape) * ITEM_BYTES[held.dtype]


def padded_bytes(held: HeldParameter, dp: int, zero: int = 2) -> int:
    """Bytes of the parameter in the buffer of its group; one that dp cannot split is there whole for every rank."""
    dim = held.dp_dim(zero)
    if dim is None:
        return parameter_bytes(held) * (dp if zero == 1 else 1)
    rows = -(-held.shape[dim] // dp) * dp
    return parameter_bytes(held) // held.shape[dim] * rows


def shard_bytes(held: HeldParameter, dp: int, dp_rank: int, zero: int = 2) -> int:
    """Bytes of one rank's part: a dim in chunks of equal size, the last ones shorter or empty."""
    dim = held.dp_dim(zero)
    if dp == 1 or dim is None:
        return parameter_bytes(held)
    chunk = -(-held.shape[dim] // dp)
    rows = min(max(held.shape[dim] - dp_rank * chunk, 0), chunk)
    return parameter_bytes(held) // held.shape[dim] * rows


def expected_collectives(
    program: ModelProgram,
    stages: Sequence[tuple[int, int]],
    *,
    zero: int,
    schedule: str,
    activation_checkpoint: str,
    dp_rank: int = 0,
) -> tuple[CollectivePlan, ...]:
    """Every collective of one rank of every stage in one step with gradient clipping, summed up by kind and payload.

    `stages` are unit ranges [first, last). `dp_rank` matters only for the payload of uneven FSDP2 shards: rank 0 has
    the largest. `schedule` does not change a count, see above. Payloads are in the graph's dtypes.
    """
    found: list[CollectivePlan] = []
    for stage, (first, last) in enumerate(stages):
        counts: Counter[tuple[str, str, int, str]] = Counter()
        for use, reason, count in _passes(program, first, last, activation_checkpoint):
            counts[use.axis, use.op, use.num_bytes, reason] += count
            if use.op == "send":  # between neighbours in a ring: as much comes in
                counts[use.axis, "recv", use.num_bytes, reason] += count
        for axis, op, num_bytes, reason, count in _once_a_step(program, stages, stage, zero, dp_rank):
            counts[axis, op, num_bytes, reason] += count
        found.extend(
            CollectivePlan(stage=stage, axis=axis, op=op, count=count, num_bytes=num_bytes, reason=reason)
            for (axis, op, num_bytes, reason), count in sorted(counts.items())
        )
    return tuple(found)


def _passes(
    program: ModelProgram, first: int, last: int, activation_checkpoint: str
) -> Iterator[tuple[CollectiveUse, str, int]]:
    """(collective, reason, times a step) of the operations and conversions of a stage."""
    graph, times = program.graph, program.mesh.microbatches
    for use in (*_prelude_uses(program, first, last), *prepared_uses(program, first, last)):
        yield replace(use, phase="step"), "step", 1
    for index in range(max(first, 1), last):
        unit = graph.units[index]
        lowered = program.templates[unit.template]
        for position in range(len(unit.inputs)):
            if program.prepared(index, position) is not None:
                continue
            for change in program.edge(index, position)[1]:
                for use in change.collectives(program.mesh.axis(change.axis)):
                    yield use, use.phase, times
        for use in lowered.collectives():
            yield use, use.phase, times
        if activation_checkpoint != "none" and lowered.template.is_module:
            for use in recomputed(lowered):
                yield use, "recompute", times


def prepared_changes(program: ModelProgram, first: int, last: int) -> tuple[Change, ...]:
    """The conversions of prelude values that a stage runs once a step; units that want the same share them."""
    found: dict[tuple[Value, tuple[Change, ...]], Change] = {}
    for index in range(max(first, 1), last):
        for position, value in enumerate(program.graph.units[index].inputs):
            steps = program.prepared(index, position) or ()
            for count, change in enumerate(steps, start=1):
                found[value, steps[:count]] = change
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
        if isinstance(step, Compute) and _saves(step):
            until = len(uses)
    return tuple(uses[:until])


def _saves(step: Compute) -> bool:
    if not any(value.requires_grad for value in step.outputs):
        return False
    saved = saved_of(step.node, step.operand_types)
    return bool(saved.operands or saved.outputs or saved.extra_bytes)


def _prelude_uses(program: ModelProgram, first: int, last: int) -> Iterator[CollectiveUse]:
    """Collectives of the part of the prelude that a stage needs, dead code left out."""
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
    for step in reversed(needed):
        yield from step.collectives if isinstance(step, Compute) else conversion_uses(step)


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
    program: ModelProgram, stages: Sequence[tuple[int, int]], stage: int, zero: int, dp_rank: int
) -> Iterator[tuple[str, str, int, str, int]]:
    """(axis, op, bytes, reason, count) of pipeline messages, parameters, loss and clipping of one stage."""
    graph, mesh = program.graph, program.mesh
    first, last = stages[stage]
    if stage > 0:
        for num_bytes, has_gradient in _messages(program, first):
            yield "pp", "recv", num_bytes, "stage", mesh.microbatches
            if has_gradient:
                yield "pp", "send", num_bytes, "stage", mesh.microbatches
    if stage + 1 < len(stages):
        for num_bytes, has_gradient in _messages(program, last):
            yield "pp", "send", num_bytes, "stage", mesh.microbatches
            if has_gradient:
                yield "pp", "recv", num_bytes, "stage", mesh.microbatches

    held = held_parameters(program, first, last)
    shards = mesh.shards if zero >= 2 else 1
    shard_rank = dp_rank % mesh.shards if zero >= 2 else dp_rank
    if zero == 1 and mesh.dp > 1:
        yield from _zero1(held, mesh.dp)
    elif shards > 1:
        has_blocks = any(graph.templates[unit.template].is_module for unit in graph.units[1:])
        yield from _fsdp(held, mesh, zero, has_blocks=has_blocks)
    trainable = [parameter for parameter in held if parameter.trainable]
    for axis in ("dp", *REDUCED_AXES):
        if axis != "dp" or zero == 0:
            partial = [parameter for parameter in trainable if axis in parameter.partial]
            yield from _bucket(axis, partial, shards, shard_rank)
    others = [held_parameters(program, *theirs) for index, theirs in enumerate(stages) if index != stage]
    elsewhere = {parameter.fqn for theirs in others for parameter in theirs}
    for parameter in trainable:
        if parameter.fqn in elsewhere:
            split = mesh.shards if zero >= 1 else 1
            yield TIED, "all_reduce", shard_bytes(parameter, split, shard_rank, zero), "tied", 1
    for axis in loss_axes(program):
        yield axis, "all_reduce", ITEM_BYTES[graph.type_of(graph.loss).dtype], "loss", 1
    if mesh.world_size > 1:
        yield WORLD, "all_reduce", ITEM_BYTES["float32"], "clip", 1


def loss_axes(program: ModelProgram) -> tuple[str, ...]:
    """The axes over which the ranks add up their parts of the loss, one after the other; "world" for all at once.

    Over pp it goes from the last stage to the others, which have zero.
    """
    graph, sizes = program.graph, program.mesh.sizes
    layout = program.templates[graph.units[graph.loss.unit].template].outputs[graph.loss.output].layout
    axes = [axis for axis in SPLIT_AXES if sizes[axis] > 1 and layout.get(axis) == PARTIAL]
    axes += ["pp"] if sizes["pp"] > 1 else []
    return (WORLD,) if len(axes) > 1 and len(axes) == sum(size > 1 for size in sizes.values()) else tuple(axes)


def _zero1(held: Iterable[HeldParameter], dp: int) -> Iterator[tuple[str, str, int, str, int]]:
    """Whole parameters gathered from the parts that dp ranks have updated, whole gradients added up into the parts."""
    gathered: Counter[tuple[str, str]] = Counter()
    scattered: Counter[tuple[str, str]] = Counter()
    for parameter in held:
        size = padded_bytes(parameter, dp, zero=1)
        gathered[parameter.group, parameter.dtype] += size if parameter.dp_dim(1) is not None else 0
        scattered[parameter.group, parameter.dtype] += size if parameter.trainable else 0
    for op, sizes in (("all_gather", gathered), ("reduce_scatter", scattered)):
        for num_bytes in filter(None, sizes.values()):
            yield "dp", op, num_bytes, "zero1", 1


def _fsdp(
    held: Iterable[HeldParameter], mesh: Mesh, zero: int, *, has_blocks: bool
) -> Iterator[tuple[str, str, int, str, int]]:
    """Over all of dp, or within groups of it (dp_shard) whose gradients are then added up (dp_replicate)."""
    axis, dp = "dp_shard" if mesh.replicas > 1 else "dp", mesh.shards
    gathered: Counter[str] = Counter()
    scattered: Counter[str] = Counter()
    for parameter in held:
        gathered[parameter.group] += padded_bytes(parameter, dp)
        if parameter.trainable:
            scattered[parameter.group] += padded_bytes(parameter, dp)
    for group, num_bytes in gathered.items():
        is_kept = zero == 2 or (has_blocks and not group)
        yield axis, "all_gather", num_bytes, "fsdp", 1 if is_kept else mesh.microbatches + 1
        if scattered[group]:
            yield axis, "reduce_scatter", scattered[group], "fsdp", 1
            if mesh.replicas > 1:
                yield "dp_replicate", "all_reduce", scattered[group] // dp, "fsdp", 1


def _bucket(
    axis: str, parameters: Sequence[HeldParameter], shards: int, dp_rank: int
) -> Iterator[tuple[str, str, int, str, int]]:
    """One all_reduce for all parameters of one dtype."""
    sizes: Counter[str] = Counter()
    for parameter in parameters:
        sizes[parameter.dtype] += shard_bytes(parameter, shards, dp_rank)
    for num_bytes in sizes.values():
        yield axis, "all_reduce", num_bytes, "partial gradients", 1


__all__ = [
    "REDUCED_AXES", "HeldParameter", "expected_collectives", "held_dims", "held_parameters", "held_shape", "loss_axes",
    "padded_bytes", "parameter_bytes", "prepared_changes", "prepared_uses", "recomputed", "shard_bytes", "stage_values",
]  # fmt: skip
