"""Reads literal arguments of a node, and what the rules of views share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....cost_models.work import Work
from ...capture.graph import Arg, Node
from .factors import factor_options, is_summable, numbered_dims, partial_option
from .registry import Call, Labels, LocalTypes, Option, numbered

Options = Callable[[Node, LocalTypes], tuple[Option, ...]]
WorkRule = Callable[[Node, LocalTypes, LocalTypes], Work]
Localise = Callable[[Node, Labels, LocalTypes, Mapping[str, int]], Call]


def argument(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """An argument by position or keyword."""
    return node.args[position] if len(node.args) > position else dict(node.kwargs).get(name, default)


def integers(arg: Arg) -> tuple[int, ...]:
    """A literal int or tuple of ints as a tuple.

    Raises:
        TypeError: anything else.
    """
    items = arg if isinstance(arg, tuple) else (arg,)
    if not all(isinstance(item, int) for item in items):
        raise TypeError(f"{arg!r} is no list of whole numbers")
    return tuple(item for item in items if isinstance(item, int))


def dim_of(arg: Arg, rank: int) -> int:
    """A dim, counted from the front."""
    (dim,) = integers(arg)
    return dim + rank if dim < 0 else dim


def whole(arg: Arg) -> int | None:
    """A literal int or None.

    Raises:
        TypeError: anything else.
    """
    return None if arg is None else integers(arg)[0]


def with_argument(node: Node, position: int, name: str, value: Arg) -> Call:
    """The local call with one argument replaced."""
    args, kwargs = numbered(node)
    if len(args) > position:
        args = (*args[:position], value, *args[position + 1 :])
    else:
        kwargs = (*((k, v) for k, v in kwargs if k != name), (name, value))
    return Call(target=node.op, args=args, kwargs=kwargs)


def with_partial(options: Options) -> Options:
    """These options and "partial": the operation is linear in all its operands together."""

    def every(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        found = options(node, operands)
        if is_summable(operands) and is_summable(node.outputs):
            return (*found, partial_option(node, operands, range(len(operands))))
        return found

    return every


def moved(node: Node, operands: LocalTypes, source: Sequence[int | None]) -> tuple[Option, ...]:
    """Output dim j is operand dim `source[j]`, or new."""
    names = numbered_dims(node.output.shape)
    (value,) = operands
    mine = [""] * len(value.shape)
    for j, i in enumerate(source):
        if i is not None:
            mine[i] = names[j]
    return factor_options([mine], [names], operands, node.outputs)
