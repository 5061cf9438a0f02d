"""Lowered program + units of a stage -> the parameters that one rank of it holds, and how dp splits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from ..capture.graph import ITEM_BYTES, Kind, TensorType
from ..sharding.mesh import PARAMETER_AXES, SPLIT_AXES, Mesh
from ..sharding.placement import REPLICATED, SUMMED_GRADIENT, Layout
from ..sharding.program import ModelProgram


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
    """Local shape of a parameter; S(dim; groups) is held as a plain split of (..., groups, rest, ...).

    A parameter without dims is held with one, so that ZeRO splits it like every other.
    """
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
    return tuple(shape) or (1,)


def held_dims(layout: Layout) -> frozenset[int]:
    """The dims of the held shape that ep and tp split."""
    pairs = [pair for name in PARAMETER_AXES if (pair := layout.get(name, REPLICATED)).is_split]
    fused = next((pair.dim for pair in pairs if pair.groups > 1), None)
    return frozenset(pair.dim + (fused is not None and pair.dim >= fused) for pair in pairs)


def held_parameters(program: ModelProgram, first: int, last: int) -> tuple[HeldParameter, ...]:
    """The parameters of a stage, each once, in order of first use; the first stage also holds the unused ones."""
    found = held_of(program, range(max(first, 1), last))
    if first <= 1:
        found.update(unused_parameters(program))
    return tuple(found.values())


def held_of(program: ModelProgram, units: Iterable[int]) -> dict[str, HeldParameter]:
    """The parameters of some units, by FQN, in order of first use."""
    graph = program.graph
    found: dict[str, HeldParameter] = {}
    parameters: dict[int, list[tuple[str, HeldParameter]]] = {}
    for index in units:
        unit = graph.units[index]
        if unit.template not in parameters:
            parameters[unit.template] = parameters_of(program, unit.template)
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
    return found


def unused_parameters(program: ModelProgram) -> dict[str, HeldParameter]:
    """The parameters that no unit reads, by FQN."""
    graph = program.graph
    used = {fqn for unit in graph.units for _, fqn in unit.tensors}
    return {
        fqn: HeldParameter(
            fqn=fqn,
            shape=held_shape(info.type, {}, program.mesh),
            dtype=info.type.dtype,
            trainable=False,
            partial=frozenset(),
            group="",
        )
        for fqn, info in graph.tensors.items()
        if fqn not in used and not info.is_buffer
    }


def parameters_of(program: ModelProgram, template: int) -> list[tuple[str, HeldParameter]]:
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


def _row_bytes(held: HeldParameter, dim: int) -> int:
    return prod((*held.shape[:dim], *held.shape[dim + 1 :])) * ITEM_BYTES[held.dtype]


def padded_bytes(held: HeldParameter, dp: int, zero: int = 2) -> int:
    """Bytes of the parameter in the buffer of its group; one that dp cannot split is there whole for every rank."""
    dim = held.dp_dim(zero)
    if dim is None:
        return parameter_bytes(held) * (dp if zero == 1 else 1)
    rows = -(-held.shape[dim] // dp) * dp
    return _row_bytes(held, dim) * rows


def shard_bytes(held: HeldParameter, dp: int, dp_rank: int, zero: int = 2) -> int:
    """Bytes of one rank's part: a dim in chunks of equal size, the last ones shorter or empty."""
    dim = held.dp_dim(zero)
    if dp == 1 or dim is None:
        return parameter_bytes(held)
    chunk = -(-held.shape[dim] // dp)
    rows = min(max(held.shape[dim] - dp_rank * chunk, 0), chunk)
    return _row_bytes(held, dim) * rows


__all__ = [
    "HeldParameter", "held_dims", "held_of", "held_parameters", "held_shape", "padded_bytes", "parameter_bytes",
    "parameters_of", "shard_bytes", "unused_parameters",
]  # fmt: skip
