"""Parts of a dim and joined parts: split, slice, select, unbind, cat, stack, pad, and what moves positions in a dim.

All are linear ("partial"). Cutting and joining turn a split into one with groups:

- split_with_sizes into c equal pieces: S(dim; c) -> S(dim) in every piece; cat is the reverse;
- pieces of unequal sizes that share a unit u: S(dim; size/u) -> S(dim; piece/u).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd

from ...capture.graph import Node, TensorType
from ..placement import split
from .arguments import (
    Localise,
    Options,
    WorkRule,
    argument,
    dim_of,
    integers,
    moved,
    whole,
    with_argument,
    with_partial,
)
from .factors import (
    copy_work,
    factor_options,
    is_summable,
    numbered_dims,
    partial_option,
    run_option,
    saves_nothing,
    size_of,
    view_with_copied_gradient_work,
)
from .registry import Call, Labels, LocalTypes, OpRule, Option, numbered, register, same_call

END = 2**63 - 1  # how torch writes an open end


def _others(node: Node, operands: LocalTypes, own: int) -> list[Option]:
    """Dims that neither operands nor outputs cut; all have the same rank."""
    names = numbered_dims(operands[0].shape, (own,))
    return list(factor_options([names] * len(operands), [names] * len(node.outputs), operands, node.outputs))


def _pieces(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    own = dim_of(argument(node, 2, "dim", 0), len(operands[0].shape))
    found = _others(node, operands, own)
    sizes = [value.shape[own] for value in node.outputs]
    unit = gcd(*sizes)
    if unit > 1:
        whole = (split(own, sum(sizes) // unit),)
        found.append(run_option(f"d{own}", unit, whole, [split(own, size // unit) for size in sizes]))
    return tuple(found)


def _localise_pieces(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    own = dim_of(argument(node, 2, "dim", 0), len(outputs[0].shape))
    return with_argument(node, 1, "split_sizes", tuple(value.shape[own] for value in outputs))


def _cat(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    if len({len(value.shape) for value in operands}) > 1:
        return ()  # an empty tensor of rank one among them
    own = dim_of(argument(node, 1, "dim", 0), len(operands[0].shape))
    found = _others(node, operands, own)
    sizes = [value.shape[own] for value in operands]
    unit = gcd(*sizes)
    if unit > 1:
        whole = (split(own, sum(sizes) // unit),)
        found.append(run_option(f"d{own}", unit, [split(own, size // unit) for size in sizes], whole))
    return tuple(found)


def _stack(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    own = dim_of(argument(node, 1, "dim", 0), len(node.output.shape))
    names = numbered_dims(node.output.shape, (own,))
    mine = [name for i, name in enumerate(names) if i != own]
    return factor_options([mine] * len(operands), [names], operands, node.outputs)


def _slice_bounds(node: Node, value: TensorType) -> tuple[int, int, int, int]:
    """(dim, start, end, step) within the dim."""
    dim = dim_of(argument(node, 1, "dim", 0), len(value.shape))
    start, end, step = (whole(argument(node, i, name)) for i, name in ((2, "start"), (3, "end"), (4, "step")))
    bounds = slice(start, end, 1 if step is None else step).indices(value.shape[dim])
    return dim, bounds[0], max(bounds[0], bounds[1]), bounds[2]


def _slice(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    (value,) = operands
    dim, start, end, step = _slice_bounds(node, value)
    found = _others(node, operands, dim)
    unit = gcd(value.shape[dim], start, end)
    if step == 1 and unit > 1 and end > start:
        runs = (split(dim, value.shape[dim] // unit),), (split(dim, (end - start) // unit),)
        found.append(run_option(f"d{dim}", unit, *runs))
    return tuple(found)


def _localise_slice(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    args, kwargs = numbered(node)
    dim = dim_of(argument(node, 1, "dim", 0), len(node.output.shape))
    parts = size_of(f"d{dim}", labels, sizes)
    if parts == 1:
        return Call(target=node.op, args=args, kwargs=kwargs)
    # Runs of the unit are cut alike, so the part begins at the same fraction; a negative start counts from the end.
    start, end = whole(argument(node, 2, "start")), whole(argument(node, 3, "end"))
    begin = 0 if start is None else start // parts
    stop = END if end is None or end == END else end // parts
    return Call(target=node.op, args=(args[0], dim, begin, stop))


def _narrow(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    return tuple(_others(node, operands, dim_of(node.args[1], len(operands[0].shape))))


def _select(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    own = dim_of(node.args[1], rank)
    return moved(node, operands, [i for i in range(rank) if i != own])


def _unbind(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    own = dim_of(argument(node, 1, "dim", 0), rank)
    names = numbered_dims(node.output.shape)
    mine = [*names[:own], "", *names[own:]]
    return factor_options([mine], [names] * len(node.outputs), operands, node.outputs)


def _diagonal(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    first = dim_of(argument(node, 2, "dim1", 0), rank)
    second = dim_of(argument(node, 3, "dim2", 1), rank)
    return moved(node, operands, [*(i for i in range(rank) if i not in (first, second)), None])


def _glu(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """The first half times the sigmoid of the second: a split of both halves alike."""
    own = dim_of(argument(node, 1, "dim", -1), len(operands[0].shape))
    half = node.output.shape[own]
    found = _others(node, operands, own)
    return (*found, run_option(f"d{own}", half, (split(own, 2),), (split(own),))) if half > 1 else tuple(found)


# Operations that move positions of some dims about.


def _keeping(dims: Callable[[Node, int], Sequence[int]]) -> Options:
    """Same shape in and out; the dims named are never split."""

    def options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        names = numbered_dims(operands[0].shape, dims(node, len(operands[0].shape)))
        return factor_options([names], [names], operands, node.outputs)

    return options


def _flipped(node: Node, rank: int) -> Sequence[int]:
    return [dim_of(i, rank) for i in integers(node.args[1])]


def _rolled(node: Node, rank: int) -> Sequence[int]:
    dims = argument(node, 2, "dims", ())
    return [dim_of(i, rank) for i in integers(dims)] if dims not in ((), None) else range(rank)


def _last_two(node: Node, rank: int) -> Sequence[int]:
    return (rank - 2, rank - 1)


def _pad(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    padding = integers(node.args[1])
    rank = len(operands[0].shape)
    touched = [rank - 1 - i // 2 for i, amount in enumerate(padding) if amount]
    names = numbered_dims(operands[0].shape, touched)
    found = factor_options([names], [names], operands, node.outputs)
    mode = argument(node, 2, "mode", "constant") if node.op == "aten.pad.default" else "constant"
    value = argument(node, 3 if node.op == "aten.pad.default" else 2, "value", 0)
    linear = mode != "constant" or not value
    if linear and is_summable(operands):
        return (*found, partial_option(node, operands, (0,)))
    return found


def _unfold(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    own = dim_of(node.args[1], rank)
    return moved(node, operands, [None if i == own else i for i in range(rank)] + [None])


def _without_new(options: Options) -> Options:
    """Only factors that the operand holds."""

    def kept(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        return tuple(option for option in options(node, operands) if option.operands[0].is_split)

    return kept


def _part(
    *ops: str, options: Options, work: WorkRule = view_with_copied_gradient_work, localise: Localise = same_call
) -> None:
    register(OpRule(ops=ops, options=with_partial(options), work=work, saved=saves_nothing, localise=localise))


_part("aten.split_with_sizes.default", options=_pieces, localise=_localise_pieces)
_part("aten.slice.Tensor", options=_slice, localise=_localise_slice)
_part("aten.narrow.default", options=_narrow)
_part("aten.select.int", options=_select)
_part("aten.unbind.int", options=_unbind)
_part("aten.unfold.default", options=_without_new(_unfold))
_part("aten.diagonal.default", options=_without_new(_diagonal))
_part("aten.cat.default", options=_cat, work=copy_work)
_part("aten.stack.default", options=_stack, work=copy_work)
_part("aten.flip.default", options=_keeping(_flipped), work=copy_work)
_part("aten.roll.default", options=_keeping(_rolled), work=copy_work)
_part("aten.tril.default", "aten.triu.default", options=_keeping(_last_two), work=copy_work)
register(
    OpRule(ops=("aten.constant_pad_nd.default", "aten.pad.default"), options=_pad, work=copy_work, saved=saves_nothing)
)
register(OpRule(ops=("aten.glu.default",), options=_glu))
