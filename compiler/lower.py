"""ModelProgram + stage boundaries -> what each pipeline stage runs and holds: the last step before text.

Decides which values cross stage edges, which prelude values a stage computes, which runs of units become loops, and how
every parameter is held (DTensor placement, fused dims, partial gradients, ties across stages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..planner.capture.graph import ModelGraph, TensorType, Value
from ..planner.errors import AutoparError, UnsupportedModel
from ..planner.sharding.mesh import MICROBATCH
from ..planner.sharding.placement import (
    PARTIAL,
    REPLICATED,
    Layout,
    Pair,
    local_groups,
    local_type,
)
from ..planner.sharding.program import ModelProgram
from ..planner.sharding.redistribute import Change
from .held import PRELUDE, HeldTensor, held_tensors


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
    if len(stages) % program.mesh.pp:
        raise AutoparError(f"{len(stages)} stages on a mesh with pp={program.mesh.pp}", where="plan.json: stages")


def _check_ties(stages: Sequence[StageProgram], ties: Mapping[str, tuple[int, ...]]) -> None:
    for fqn, where in ties.items():
        placed = {
            " and ".join(f"{pair} on {axis}" for axis, pair in tensor.splits) or "whole"
            for index in where
            for tensor in stages[index].tensors
            if tensor.fqn == fqn
        }
        if len(placed) > 1:
            raise AutoparError(
                f"tied parameter {fqn} is placed differently on its stages: {', '.join(sorted(placed))}",
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
        tensors=held_tensors(program, first, last, prelude, is_first=index == 0),
    )


def _edges(program: ModelProgram, unit: int) -> tuple[Edge, ...]:
    return tuple(_edge(program, unit, position) for position in range(len(program.graph.units[unit].inputs)))


def _edge(program: ModelProgram, unit: int, position: int) -> Edge:
    """A prelude value is converted once a step, then sliced; each microbatch does what has to follow the slice."""
    value, found = program.edge(unit, position)
    slices = [change for change in found if change.axis == MICROBATCH]
    layout = output_layout(program, value)
    prepared = program.prepared(unit, position)
    if slices and (value.unit != PRELUDE or not slices[0].target.is_split):
        raise AutoparError(
            f"{program.graph.units[unit].fqn or 'a unit'} reads a value as {slices[0].target} on the microbatch axis "
            f"that was made as {slices[0].source}",
            fix="use one microbatch",
        )
    for change in prepared:
        layout = {**layout, change.axis: change.target}
    batch = None
    if slices:
        layout = {**layout, MICROBATCH: slices[0].target}
        batch = slices[0].target.dim, local_groups(layout, MICROBATCH, program.mesh.axes)
    changes = program.in_microbatch(unit, position)
    return Edge(value=value, layout=layout, changes=changes, prepared=prepared, batch=batch)


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


def local_output(program: ModelProgram, value: Value) -> TensorType:
    """The local type of a value as it crosses a stage edge."""
    return local_type(program.graph.type_of(value), output_layout(program, value), program.mesh.axes)


__all__ = [
    "Edge", "LoweredModel", "Run", "StageProgram", "crossing", "local_output", "lower",
    "output_layout",
]  # fmt: skip
