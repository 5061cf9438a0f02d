"""ModelProgram + stage boundaries -> what each pipeline stage runs and holds: the last step before text.

Decides which values cross stage edges, which prelude values a stage computes, which runs of units become loops, and how
every parameter is held (DTensor placement, fused dims, partial gradients, ties across stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..planner.capture.graph import Kind, ModelGraph, TensorType, Value
from ..planner.errors import AutoparError, UnsupportedModel
from ..planner.sharding.mesh import MICROBATCH
from ..planner.sharding.placement import (
    PARTIAL,
    REPLICATED,
    SUMMED_GRADIENT,
    Layout,
    Pair,
    local_groups,
    local_type,
)
from ..planner.sharding.program import ModelProgram
from ..planner.sharding.redistribute import Change
from .gradients import shared_gradients

PRELUDE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A parameter or buffer as a stage holds it.

    `pair` is its placement on tp. A split in groups is held with the groups as a dim of their own, so that it is
    a plain Shard(`shard_dim`); `fused_dim` is the dim to flatten with the next one for the user's shape. `partial`:
    axes over which its gradient is a partial sum until the end of the step. `shares_gradient`: autograd may hand it
    a gradient that is another tensor's memory.
    """

    fqn: str
    type: TensorType
    pair: Pair
    is_buffer: bool
    persistent: bool
    partial: tuple[str, ...] = ()
    shares_gradient: bool = False

    @property
    def fused_dim(self) -> int | None:
        return self.pair.dim if self.pair.is_split and self.pair.groups > 1 else None

    @property
    def shard_dim(self) -> int | None:
        if not self.pair.is_split:
            return None
        return self.pair.dim + (self.pair.groups > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape as held."""
        shape = self.type.shape
        if self.fused_dim is None:
            return shape
        dim, groups = self.pair.dim, self.pair.groups
        return (*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """How one input of a unit is fed: the value, and the conversions that the unit runs on it.

    For a prelude value `prepared` are conversions that run once a step, before `batch`, (dim, groups) of the slice that
    each microbatch takes, None if it takes all.
    """

    value: Value
    layout: Layout  # before `changes`: prepared, a microbatch's slice taken
    changes: tuple[Change, ...]
    prepared: tuple[Change, ...] = ()
    batch: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive units of one template, fed alike: a loop if there are several.

    `carried`: input position -> output position of the unit before, inside the run. `edges` are those of the first
    unit, `later` those of every other one: alike, or without the conversions that only the first needs.
    """

    template: int
    units: tuple[int, ...]
    edges: tuple[Edge, ...]
    later: tuple[Edge, ...] = ()
    carried: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """Units [first, last) on one pipeline stage. `received`, `sent`: in the order of its arguments and outputs."""

    index: int
    first: int
    last: int
    received: tuple[Value, ...]
    sent: tuple[Value, ...]
    prelude: tuple[Value, ...]
    runs: tuple[Run, ...]
    tensors: tuple[HeldTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredModel:
    """`ties`: parameter FQN -> the stages that hold it, if several. `loss_axes`: where the loss is a partial sum."""

    program: ModelProgram
    stages: tuple[StageProgram, ...]
    ties: tuple[tuple[str, tuple[int, ...]], ...]
    loss_axes: tuple[str, ...]

    @property
    def graph(self) -> ModelGraph:
        return self.program.graph


def lower(program: ModelProgram, stages: Sequence[tuple[int, int]]) -> LoweredModel:
    """Lower a plan's program for its stages, unit ranges [first, last).

    Raises:
        AutoparError: the stages do not cover the units in order, or something the emitted code cannot hold.
    """
    _check_stages(program, stages)
    prelude = program.graph.template_of(PRELUDE)
    if prelude.buffer_updates:
        name = prelude.buffer_updates[0][0]
        raise UnsupportedModel(f"buffer {name} is updated from inputs and buffers alone, outside any module")
    lowered = tuple(_stage(program, stages, index) for index in range(len(stages)))
    holders: dict[str, list[int]] = {}
    for stage in lowered:
        for tensor in stage.tensors:
            if not tensor.is_buffer and tensor.type.requires_grad:
                holders.setdefault(tensor.fqn, []).append(stage.index)
    ties = tuple((fqn, tuple(where)) for fqn, where in holders.items() if len(where) > 1)
    _check_ties(lowered, dict(ties))
    return LoweredModel(program=program, stages=lowered, ties=ties, loss_axes=_loss_axes(program))


def _check_stages(program: ModelProgram, stages: Sequence[tuple[int, int]]) -> None:
    units, position = len(program.graph.units), 1
    for first, last in stages:
        if max(first, 1) != position or last <= max(first, 1):
            raise AutoparError(
                f"stages {list(stages)} do not cover units 1 to {units - 1} in order",
                where="plan.json: stages",
                fix="let each stage start where the one before ends, the last one at the end of the model",
            )
        position = last
    if position != units:
        raise AutoparError(
            f"stages end at unit {position}, the model has {units} units",
            where="plan.json: stages",
            fix="plan again, the model has changed",
        )
    if len(stages) != program.mesh.pp:
        raise AutoparError(f"{len(stages)} stages on a mesh with pp={program.mesh.pp}", where="plan.json: stages")


def _check_ties(stages: Sequence[StageProgram], ties: Mapping[str, tuple[int, ...]]) -> None:
    for fqn, where in ties.items():
        pairs = {str(tensor.pair) for index in where for tensor in stages[index].tensors if tensor.fqn == fqn}
        if len(pairs) > 1:
            raise AutoparError(
                f"tied parameter {fqn} is placed differently on its stages: {', '.join(sorted(pairs))} on tp",
                where="plan.json: placements",
                fix="give the parameter one placement wherever it is used",
            )


def _loss_axes(program: ModelProgram) -> tuple[str, ...]:
    graph = program.graph
    layout = output_layout(program, graph.loss)
    for axis, pair in layout.items():
        if pair not in (REPLICATED, PARTIAL) or (axis == MICROBATCH and pair != PARTIAL):
            raise AutoparError(f"the loss ends as {pair} on {axis}", fix="end it as R or P/R on every axis")
    if program.mesh.microbatches > 1 and layout.get(MICROBATCH) != PARTIAL:
        raise AutoparError("the loss is not a sum over microbatches", fix="use one microbatch")
    return tuple(axis.name for axis in program.mesh.axes if layout.get(axis.name) == PARTIAL and not axis.is_time)


def output_layout(program: ModelProgram, value: Value) -> dict[str, Pair]:
    """How the unit that makes `value` leaves it."""
    return program.templates[program.graph.units[value.unit].template].outputs[value.output].layout


def crossing(graph: ModelGraph, boundary: int) -> tuple[Value, ...]:
    """The values made before unit `boundary` (not by the prelude) and read at or after it."""
    read = {
        value for unit in graph.units[boundary:] for value in unit.inputs if PRELUDE < value.unit < boundary
    }  # fmt: skip
    if PRELUDE < graph.loss.unit < boundary < len(graph.units):
        read.add(graph.loss)
    return tuple(sorted(read, key=lambda value: (value.unit, value.output)))


def _stage(program: ModelProgram, stages: Sequence[tuple[int, int]], index: int) -> StageProgram:
    graph = program.graph
    first, last = max(stages[index][0], 1), stages[index][1]
    edges = {unit: _edges(program, unit) for unit in range(first, last)}
    prelude = {edge.value for found in edges.values() for edge in found if edge.value.unit == PRELUDE}
    return StageProgram(
        index=index,
        first=first,
        last=last,
        received=crossing(graph, first) if index else (),
        sent=crossing(graph, last) if index + 1 < len(stages) else (),
        prelude=tuple(sorted(prelude, key=lambda value: value.output)),
        runs=_runs(program, edges),
        tensors=_tensors(program, first, last, prelude, is_first=index == 0),
    )


def _edges(program: ModelProgram, unit: int) -> tuple[Edge, ...]:
    return tuple(_edge(program, unit, position) for position in range(len(program.graph.units[unit].inputs)))


def _edge(program: ModelProgram, unit: int, position: int) -> Edge:
    """A prelude value is converted once a step, then sliced, if it can be; else each microbatch converts its slice."""
    value, found = program.edge(unit, position)
    slices = [change for change in found if change.axis == MICROBATCH]
    layout = output_layout(program, value)
    prepared = program.prepared(unit, position)
    if not slices and prepared is None:
        return Edge(value=value, layout=layout, changes=found)
    if slices and (value.unit != PRELUDE or not slices[0].target.is_split):
        raise AutoparError(
            f"{program.graph.units[unit].fqn or 'a unit'} reads a value as {slices[0].target} on the microbatch axis "
            f"that was made as {slices[0].source}",
            fix="use one microbatch",
        )
    changes = () if prepared is not None else tuple(change for change in found if change.axis != MICROBATCH)
    for change in prepared or ():
        layout = {**layout, change.axis: change.target}
    batch = None
    if slices:
        layout = {**layout, MICROBATCH: slices[0].target}
        batch = slices[0].target.dim, local_groups(layout, MICROBATCH, program.mesh.axes)
    return Edge(value=value, layout=layout, changes=changes, prepared=prepared or (), batch=batch)


def _runs(program: ModelProgram, edges: Mapping[int, tuple[Edge, ...]]) -> tuple[Run, ...]:
    """Greedy: a run grows while the next unit has the same template and is fed the same way."""
    graph = program.graph
    readers: dict[Value, set[int]] = {}
    for index, unit in enumerate(graph.units):
        for value in unit.inputs:
            readers.setdefault(value, set()).add(index)
    runs: list[Run] = []
    for unit, found in edges.items():
        template = graph.units[unit].template
        if runs and runs[-1].template == template and graph.templates[template].is_module:
            grown = _grow(graph, runs[-1], unit, found, readers)
            if grown is not None:
                runs[-1] = grown
                continue
        runs.append(Run(template=template, units=(unit,), edges=found))
    return tuple(_as_loop(program, run, readers) for run in runs)


def _as_loop(program: ModelProgram, run: Run, readers: Mapping[Value, set[int]]) -> Run:
    """A block alone on its stage, with what a loop over it and its neighbour on the next or last stage would carry."""
    graph, (unit, *more) = program.graph, run.units
    if more or not graph.templates[run.template].is_module:
        return run
    for first, second in ((unit, unit + 1), (unit - 1, unit)):
        if (
            first > PRELUDE
            and second < len(graph.units)
            and graph.units[first].template == graph.units[second].template
        ):
            alone = Run(template=run.template, units=(first,), edges=_edges(program, first))
            if (pair := _grow(graph, alone, second, _edges(program, second), readers)) is not None:
                return replace(run, later=pair.later, carried=pair.carried)
    return run


def _grow(
    graph: ModelGraph, run: Run, unit: int, edges: tuple[Edge, ...], readers: Mapping[Value, set[int]]
) -> Run | None:
    before = run.units[-1]
    if unit != before + 1 or not _passed_alike(graph, before, unit):
        return None
    template = graph.templates[run.template]
    for output in range(len(template.outputs)):
        value = Value(before, output)
        if readers.get(value, set()) - {unit} or value == graph.loss:
            return None
    carried: dict[int, int] = {}
    for position, (edge, first) in enumerate(zip(edges, run.later or run.edges, strict=True)):
        if not _fed_alike(first, edge, is_second=not run.later, is_carried=edge.value.unit == before):
            return None
        if edge.value.unit == before:
            carried[position] = edge.value.output
        elif edge.value != run.edges[position].value:
            return None
    if len(run.units) > 1 and tuple(sorted(carried.items())) != run.carried:
        return None
    # Two inputs fed by one output are one variable of the loop: they must start as one.
    starts: dict[int, Value] = {}
    for position, output in carried.items():
        if starts.setdefault(output, run.edges[position].value) != run.edges[position].value:
            return None
        if graph.type_of(run.edges[position].value).shape != graph.type_of(Value(before, output)).shape:
            return None
    return replace(run, units=(*run.units, unit), later=edges, carried=tuple(sorted(carried.items())))


def _passed_alike(graph: ModelGraph, one: int, other: int) -> bool:
    """Whether two units of a template read the same tensors where not every unit of it holds its own."""
    units = [unit for unit in graph.units[PRELUDE + 1 :] if unit.template == graph.units[one].template]
    first, second = dict(graph.units[one].tensors), dict(graph.units[other].tensors)
    for node, fqn in first.items():
        path = _path_inside(graph.units[one].fqn, fqn)
        is_owned = path and all(_path_inside(unit.fqn, dict(unit.tensors)[node]) == path for unit in units)
        if not is_owned and second[node] != fqn:
            return False
    return True


def _path_inside(unit: str, fqn: str) -> str:
    """The path of a tensor below its unit's module, "" where it lies elsewhere."""
    return fqn.removeprefix(f"{unit}.") if fqn.startswith(f"{unit}.") else ""


def _fed_alike(one: Edge, other: Edge, *, is_second: bool, is_carried: bool) -> bool:
    """Whether two units of a loop take an input alike; the second may lack what only the value from outside needs."""
    if (one.changes, one.prepared, one.batch, one.layout) == (
        other.changes,
        other.prepared,
        other.batch,
        other.layout,
    ):
        return True
    return is_second and is_carried and not other.changes and one.batch is None


def _tensors(
    program: ModelProgram, first: int, last: int, prelude: set[Value], *, is_first: bool
) -> tuple[HeldTensor, ...]:
    """Every parameter and buffer that the stage reads, in order of first use; the first stage holds unused ones too."""
    graph = program.graph
    found: dict[str, HeldTensor] = {}
    shared = {
        index: shared_gradients(program.templates[index])
        for index in {graph.units[unit].template for unit in range(first, last)}
    }
    for unit in (PRELUDE, *range(first, last)):
        lowered = program.templates[graph.units[unit].template]
        fqns = dict(graph.units[unit].tensors)
        needed = prelude_tensors(program, prelude) if unit == PRELUDE else None
        for held in lowered.tensors:
            node = lowered.template.by_name[held.ref.node]
            if node.kind is Kind.CONSTANT or (needed is not None and node.name not in needed):
                continue
            tensor = _held(program, fqns[node.name], node.output, held.layout, node.kind is Kind.BUFFER)
            if node.name in shared.get(graph.units[unit].template, ()):
                tensor = replace(tensor, shares_gradient=True)
            found[tensor.fqn] = _merged(found.get(tensor.fqn, tensor), tensor)
    if is_first:
        used = {fqn for unit in graph.units for _, fqn in unit.tensors}
        for fqn, info in graph.tensors.items():
            if fqn not in used:
                found[fqn] = _held(program, fqn, info.type, {}, info.is_buffer)
    return tuple(found.values())


def _held(program: ModelProgram, fqn: str, value: TensorType, layout: Layout, is_buffer: bool) -> HeldTensor:
    info = program.graph.tensors.get(fqn)
    if MICROBATCH in layout and layout[MICROBATCH].is_split:
        raise AutoparError(f"{fqn} is split over microbatches", fix="use one microbatch")
    pair = layout.get("tp", REPLICATED)
    dp = layout.get("dp", REPLICATED)
    if dp.is_split or dp == PARTIAL or pair == PARTIAL:
        raise AutoparError(
            f"{fqn} is placed {pair} on tp and {dp} on dp",
            where="plan.json: placements",
            fix="a parameter is R, R/P or S(dim) on tp and R or R/P on dp",
        )
    partial: tuple[str, ...] = ()
    if value.requires_grad:
        partial = tuple(axis.name for axis in program.mesh.axes if layout.get(axis.name) == SUMMED_GRADIENT)
        partial = tuple(axis for axis in partial if axis != MICROBATCH)
        if program.mesh.microbatches > 1 and layout.get(MICROBATCH) != SUMMED_GRADIENT and layout:
            raise AutoparError(f"the gradient of {fqn} does not add up over microbatches", fix="use one microbatch")
    return HeldTensor(
        fqn=fqn,
        type=value,
        pair=pair,
        is_buffer=is_buffer,
        persistent=info.persistent if info is not None else True,
        partial=partial,
    )


def _merged(one: HeldTensor, other: HeldTensor) -> HeldTensor:
    """One tensor read by several units: the same placement, or R and R/P side by side (then held R/P)."""
    if other.shares_gradient and not one.shares_gradient:
        one = replace(one, shares_gradient=True)
    if one.pair == other.pair and one.partial == other.partial:
        return one
    if one.pair.is_split or other.pair.is_split:
        raise AutoparError(
            f"{one.fqn} is placed {one.pair} by one use and {other.pair} by another on tp",
            where="plan.json: placements",
            fix="give the parameter one placement wherever it is used",
        )
    partial = tuple(axis for axis in ("dp", "tp") if axis in (*one.partial, *other.partial))
    return replace(one, pair=SUMMED_GRADIENT if "tp" in partial else REPLICATED, partial=partial)


def prelude_tensors(program: ModelProgram, values: set[Value]) -> frozenset[str]:
    """Names of the prelude's buffers that `values` depend on."""
    template = program.templates[program.graph.units[PRELUDE].template].template
    wanted = {template.outputs[value.output].node for value in values}
    for node in reversed(template.nodes):
        if node.name in wanted:
            wanted.update(ref.node for ref in node.operands)
    return frozenset(wanted)


def local_output(program: ModelProgram, value: Value) -> TensorType:
    """The local type of a value as it crosses a stage edge."""
    return local_type(program.graph.type_of(value), output_layout(program, value), program.mesh.axes)


__all__ = [
    "PRELUDE", "Edge", "HeldTensor", "LoweredModel", "Run", "StageProgram", "crossing", "local_output", "lower",
    "output_layout", "prelude_tensors",
]  # fmt: skip
