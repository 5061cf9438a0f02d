"""Lookups and writes by index: the indexed dim stays whole; the indices' own dims and all others may be split."""

from __future__ import annotations

from ....cost_models.work import Pass, Work
from ...capture.graph import Node, Ref
from .arguments import argument, dim_of, integers
from .factors import copy_work, factor_options, numbered_dims
from .registry import LocalTypes, OpRule, Option, Saved, pointwise_work, register


def _gather(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Dims where table and index have the same size are shared; the index may split along the indexed dim."""
    value, index = operands
    if not value.shape or not index.shape:
        return ()
    own = dim_of(node.args[1], len(value.shape))
    names = numbered_dims(index.shape)
    names = [n if i == own or index.shape[i] == value.shape[i] else "" for i, n in enumerate(names)]
    mine = ["" if i == own else name for i, name in enumerate(names)]
    return factor_options([mine, names], [names], operands, node.outputs)


def _scatter(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Only dims that all tensors share in full, never the indexed one."""
    value = operands[0]
    if any(len(other.shape) != len(value.shape) for other in operands) or not value.shape:
        return ()
    own = dim_of(node.args[1], len(value.shape))
    unequal = [i for i, size in enumerate(value.shape) if any(other.shape[i] != size for other in operands)]
    names = numbered_dims(value.shape, (own, *unequal))
    return factor_options([names] * len(operands), [names], operands, node.outputs)


def _index_select(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    value, index = operands
    if not value.shape or len(index.shape) != 1:
        return ()
    own = dim_of(node.args[1], len(value.shape))
    names = numbered_dims(value.shape)
    mine = ["" if i == own else name for i, name in enumerate(names)]
    return factor_options([mine, [names[own]]], [names], operands, node.outputs)


def _index(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Advanced indexing: dims without an index pass; dims of the indices, broadcast together, are new factors.

    The index dims stand where the indices are if these are neighbours, else in front.
    """
    value, *indices = operands
    entries = node.args[1]
    if not isinstance(entries, tuple) or any(index.dtype in ("bool", "uint8") for index in indices):
        return ()
    indexed = [i for i, entry in enumerate(entries) if isinstance(entry, Ref)]
    if not indexed:
        return ()
    width = max(len(index.shape) for index in indices)
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if neighbours else 0
    names = numbered_dims(node.output.shape)
    rest = iter(names[:first] + names[first + width :])
    mine = ["" if i in indexed else next(rest) for i in range(len(value.shape))]
    block, shape = names[first : first + width], node.output.shape[first : first + width]
    others = []
    for index in indices:
        skip = width - len(index.shape)
        others.append([block[skip + i] if size == shape[skip + i] else "" for i, size in enumerate(index.shape)])
    return factor_options([mine, *others], [names], operands, node.outputs)


def _one_hot(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    # Without a literal number of classes the output's shape depends on the largest index.
    classes = argument(node, 1, "num_classes", -1)
    if integers(classes)[0] < 0:
        return ()
    names = numbered_dims(operands[0].shape)
    return factor_options([names], [[*names, ""]], operands, node.outputs)


def _lookup_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Reads what it writes, and the indices; backward clears a gradient of the table and adds to it."""
    value, *indices = operands
    read = sum(index.num_bytes for index in indices)
    forward = Pass(bytes=read + 2 * outputs[0].num_bytes, kernels=1)
    if not value.requires_grad:
        return Work(forward=forward, dtype=outputs[0].dtype)
    traffic = value.num_bytes + read + 2 * outputs[0].num_bytes
    return Work(
        forward=forward,
        backward=Pass(flops=outputs[0].numel, bytes=traffic, kernels=2),
        dtype=outputs[0].dtype,
    )


def _saves_indices(node: Node) -> Saved:
    return Saved(operands=tuple(range(1, len(node.operands))))


def _saves_second(node: Node) -> Saved:
    return Saved(operands=(1,))


def _saves_none(node: Node) -> Saved:
    return Saved()


register(OpRule(ops=("aten.gather.default",), options=_gather, work=_lookup_work))
register(
    OpRule(
        ops=("aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default"),
        options=_scatter,
        work=pointwise_work,
        saved=_saves_second,
    )
)
register(OpRule(ops=("aten.index_select.default",), options=_index_select, work=_lookup_work, saved=_saves_second))
register(OpRule(ops=("aten.index.Tensor",), options=_index, work=_lookup_work, saved=_saves_indices))
register(OpRule(ops=("aten.one_hot.default",), options=_one_hot, work=copy_work, saved=_saves_none))
