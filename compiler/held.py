"""Parameters and buffers as a pipeline stage holds them: their placement on tp, fused dims, partial gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..planner.capture.graph import Kind, TensorType, Value
from ..planner.errors import AutoparError
from ..planner.sharding.mesh import MICROBATCH
from ..planner.sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout, Pair
from ..planner.sharding.program import ModelProgram
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


__all__ = ["PRELUDE", "HeldTensor", "held_tensors", "prelude_tensors"]
