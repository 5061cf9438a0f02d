"""Views of a whole tensor: permutations, reshape, dims of size one, expand, and the copies that repeat a dim.

All are linear ("partial"). Flattening turns a split into one with groups: in reshape (B, T) -> (B*T) a split of T is
S(0;B) of the flattened dim. Parts of a tensor are in `parts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...capture.graph import Node, TensorType
from ..placement import Pair, split
from .arguments import (
    Localise,
    Options,
    WorkRule,
    argument,
    dim_of,
    integers,
    moved,
    with_argument,
    with_partial,
)
from .factors import copy_work, factor_options, free_work, numbered_dims, run_option, saves_nothing, size_of
from .registry import Call, Labels, LocalTypes, OpRule, Option, numbered, register, same_call

# Permutations and dims of size one.


def _permute(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    return moved(node, operands, [dim_of(i, rank) for i in integers(node.args[1])])


def _transpose(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    order: list[int | None] = list(range(len(operands[0].shape)))
    if len(node.args) > 2:
        i, j = (dim_of(arg, len(order)) for arg in node.args[1:3])
    else:
        i, j = len(order) - 2, len(order) - 1
    if len(order) > 1:
        order[i], order[j] = order[j], order[i]
    return moved(node, operands, order)


def _movedim(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    source = [dim_of(i, rank) for i in integers(node.args[1])]
    target = [dim_of(i, rank) for i in integers(node.args[2])]
    rest = iter(i for i in range(rank) if i not in source)
    return moved(node, operands, [source[target.index(j)] if j in target else next(rest) for j in range(rank)])


def _unsqueeze(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    rank = len(operands[0].shape)
    order: list[int | None] = list(range(rank))
    order.insert(dim_of(node.args[1], rank + 1), None)
    return moved(node, operands, order)


def _squeezed(node: Node, value: TensorType) -> list[int]:
    """The dims that squeeze takes away."""
    named = range(len(value.shape))
    if len(node.args) > 1:
        named = [dim_of(i, len(value.shape)) for i in integers(node.args[1])]
    return [i for i in named if value.shape[i] == 1]


def _squeeze(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    gone = _squeezed(node, operands[0])
    return moved(node, operands, [i for i in range(len(operands[0].shape)) if i not in gone])


# Reshape: the sizes are written as factors that both shapes are products of.


def _factors_of(shape: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, int]]:
    """For every factor between two cuts: the dim it lies in and the runs of that dim it is repeated in."""
    places = []
    starts, total = [1], 1
    for size in shape:
        total *= size
        starts.append(total)
    for before, after in zip(cuts, cuts[1:], strict=False):
        dim = next(i for i in range(len(shape)) if starts[i] <= before and after <= starts[i + 1] and shape[i] > 1)
        places.append((dim, before // starts[dim]))
    return places


def _products(shape: Sequence[int]) -> list[int]:
    found, total = [1], 1
    for size in shape:
        total *= size
        found.append(total)
    return found


def reshape_factors(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, Pair | None, Pair | None]]:
    """Factors common to two shapes, major first: (size, pair in `source`, pair in `target`).

    A stretch where neither shape's cuts divide the other's, (2, 3) -> (3, 2), is one factor without pairs.
    """
    cuts = sorted({*_products(source), *_products(target)})
    found: list[tuple[int, Pair | None, Pair | None]] = []
    both = sorted(set(_products(source)) & set(_products(target)))
    for low, high in zip(both, both[1:], strict=False):
        inner = [c for c in cuts if low <= c <= high]
        if any(b % a for a, b in zip(inner, inner[1:], strict=False)):
            found.append((high // low, None, None))
            continue
        places = zip(_factors_of(source, inner), _factors_of(target, inner), strict=True)
        for (a, b), (from_place, to_place) in zip(zip(inner, inner[1:], strict=False), places, strict=True):
            found.append((b // a, split(*from_place), split(*to_place)))
    return found


def _reshape(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    if 0 in node.output.shape:
        return ()
    factors = reshape_factors(operands[0].shape, node.output.shape)
    return tuple(
        run_option(f"f{i}", size, (before,), (after,))
        for i, (size, before, after) in enumerate(factors)
        if before is not None and after is not None
    )


def _local_shape(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    return with_argument(node, 1, "size", outputs[0].shape)


# Expand and repeat.


def _expand(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    (value,) = operands
    shape = node.output.shape
    first = len(shape) - len(value.shape)
    return moved(
        node,
        operands,
        [j - first if j >= first and value.shape[j - first] == shape[j] else None for j in range(len(shape))],
    )


def _repeats(node: Node, value: TensorType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Repeats of every output dim and the operand's sizes, padded to the output's rank."""
    repeats = integers(node.args[1])
    return repeats, (1,) * (len(repeats) - len(value.shape)) + value.shape


def _repeat(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    repeats, shape = _repeats(node, operands[0])
    first = len(repeats) - len(operands[0].shape)
    found = []
    for j, (times, size) in enumerate(zip(repeats, shape, strict=True)):
        if size > 1:
            found.append(run_option(f"d{j}", size, (split(j - first),), (split(j, times),)))
        if times > 1:
            found.append(run_option(f"r{j}", times, (None,), (split(j),)))
    return tuple(found)


def _localise_repeat(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    repeats = tuple(times // size_of(f"r{j}", labels, sizes) for j, times in enumerate(integers(node.args[1])))
    return with_argument(node, 1, "repeats", repeats)


def _repeat_interleave(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    (value,) = operands
    dim = argument(node, 2, "dim")
    if dim is None:
        return ()
    own = dim_of(dim, len(value.shape))
    (times,) = integers(node.args[1])
    names = numbered_dims(value.shape, (own,))
    found = list(factor_options([names], [names], operands, node.outputs))
    if value.shape[own] > 1:
        found.append(run_option(f"d{own}", value.shape[own], (split(own),), (split(own),)))
    if times > 1:
        found.append(run_option(f"r{own}", times, (None,), (split(own, value.shape[own]),)))
    return tuple(found)


def _localise_repeat_interleave(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    dim = argument(node, 2, "dim")
    if dim is None:
        return same_call(node, labels, outputs, sizes)
    own = dim_of(dim, len(node.output.shape))
    (times,) = integers(node.args[1])
    call = with_argument(node, 1, "repeats", times // size_of(f"r{own}", labels, sizes))
    return replace(call, kwargs=tuple((k, v) for k, v in call.kwargs if k != "output_size"))


def _localise_squeeze(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    # A local dim may have size one where the global one has not: say the shape instead.
    args, _ = numbered(node)
    return Call(target="aten.reshape.default", args=(args[0], outputs[0].shape))


def _view(*ops: str, options: Options, work: WorkRule = free_work, localise: Localise = same_call) -> None:
    register(OpRule(ops=ops, options=with_partial(options), work=work, saved=saves_nothing, localise=localise))


_view("aten.permute.default", options=_permute)
_view("aten.transpose.int", "aten.swapaxes.default", "aten.swapdims.default", options=_transpose)
_view("aten.t.default", "aten.mT.default", options=_transpose)
_view("aten.movedim.int", "aten.movedim.intlist", options=_movedim)
_view("aten.unsqueeze.default", options=_unsqueeze)
_view("aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims", options=_squeeze, localise=_localise_squeeze)
_view("aten.reshape.default", "aten.view.default", options=_reshape, localise=_local_shape)
_view("aten.expand.default", "aten.broadcast_to.default", options=_expand, localise=_local_shape)
_view("aten.repeat.default", options=_repeat, localise=_localise_repeat, work=copy_work)
_view(
    "aten.repeat_interleave.self_int",
    options=_repeat_interleave,
    localise=_localise_repeat_interleave,
    work=copy_work,
)
