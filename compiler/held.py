"""Parameters and buffers as a pipeline stage holds them: how ep and tp split them, fused dims, partial gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..planner.capture.graph import Kind, TensorType, Value
from ..planner.errors import AutoparError
from ..planner.sharding.mesh import MICROBATCH, PARAMETER_AXES, SPLIT_AXES
from ..planner.sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout, Pair
from ..planner.sharding.program import ModelProgram
from .gradients import shared_gradients

PRELUDE = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A parameter or buffer as a stage holds it.

    `splits` are its placements on the axes that split it (ep, tp). A split in groups is held with the groups as a dim
    of their own, so that it is a plain Shard(`shard_dim`); `fused_dim` is the dim to flatten with the next one for the
    user's shape. A parameter without dims is held with one, so that FSDP2 can split it.
    `partial`: axes over which its gradient is a partial sum until the end of the step.
    `shares_gradient`: autograd may hand it a gradient that is another tensor's memory.
    """

    fqn: str
    type: TensorType
    splits: tuple[tuple[str, Pair], ...]
    is_buffer: bool
    persistent: bool
    partial: tuple[str, ...] = ()
    shares_gradient: bool = False

    @property
    def _fused(self) -> Pair | None:
        return next((pair for _, pair in self.splits if pair.groups > 1), None)

    @property
    def fused_dim(self) -> int | None:
        return None if self._fused is None else self._fused.dim

    def shard_dim(self, axis: str) -> int | None:
        """The dim, as held, that an axis splits."""
        pair = dict(self.splits).get(axis)
        if pair is None:
            return None
        return pair.dim + (self._fused is not None and pair.dim >= self._fused.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape as held."""
        shape = self.type.shape
        if not shape and not self.is_buffer:
            return (1,)
        if self._fused is None:
            return shape
        dim, groups = self._fused.dim, self._fused.groups
        return (*shape[:dim], groups, shape[dim] // groups, *shape[dim + 1 :])


def held_tensors(
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
    pairs = {axis.name: layout.get(axis.name, REPLICATED) for axis in program.mesh.axes}
    for axis, pair in pairs.items():
        if pair == PARTIAL or (pair.is_split and axis not in PARAMETER_AXES):
            raise AutoparError(
                f"{fqn} is placed {pair} on {axis}",
                where="plan.json: placements",
                fix=f"a parameter is R, R/P or S(dim) on {' and '.join(PARAMETER_AXES)}, R or R/P on other axes",
            )
    splits = tuple((axis, pair) for axis, pair in pairs.items() if pair.is_split)
    dims = [pair.dim for _, pair in splits]
    if any(pair.groups > 1 and (axis != "tp" or dims.count(pair.dim) > 1) for axis, pair in splits):
        placed = " and ".join(f"{pair} on {axis}" for axis, pair in splits)
        raise AutoparError(
            f"{fqn} is placed {placed}",
            where="plan.json: placements",
            fix="split a dim in groups on tp alone, and on no other axis",
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
        splits=splits,
        is_buffer=is_buffer,
        persistent=info.persistent if info is not None else True,
        partial=partial,
    )


def _merged(one: HeldTensor, other: HeldTensor) -> HeldTensor:
    """One tensor read by several units: split alike, or R and R/P side by side (then held R/P)."""
    if other.shares_gradient and not one.shares_gradient:
        one = replace(one, shares_gradient=True)
    if one.splits != other.splits:
        axis, pair = next(iter(set(one.splits) ^ set(other.splits)))
        raise AutoparError(
            f"{one.fqn} is placed {pair} by one use and otherwise by another on {axis}",
            where="plan.json: placements",
            fix="give the parameter one placement wherever it is used",
        )
    partial = tuple(axis for axis in SPLIT_AXES if axis in (*one.partial, *other.partial))
    return replace(one, partial=partial)


def prelude_tensors(program: ModelProgram, values: set[Value]) -> frozenset[str]:
    """Names of the prelude's buffers that `values` depend on."""
    template = program.templates[program.graph.units[PRELUDE].template].template
    wanted = {template.outputs[value.output].node for value in values}
    for node in reversed(template.nodes):
        if node.name in wanted:
            wanted.update(ref.node for ref in node.operands)
    return frozenset(wanted)


__all__ = ["PRELUDE", "HeldTensor", "held_tensors", "prelude_tensors"]
