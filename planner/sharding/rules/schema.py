"""The arguments of a node by the names of its schema, and the dims of its tensors by letters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...capture.graph import Arg, Node
from ...errors import CannotLower
from ..mesh import MICROBATCH
from .registry import AxisRef, Call, Labels, LocalTypes, Operand, SeedRef, numbered, plain_label


def arguments(node: Node, schema: Mapping[str, Arg]) -> dict[str, Arg]:
    """Every argument by name, tensors as Operand; `schema` holds the defaults, in the order of the signature."""
    args, kwargs = numbered(node)
    return {**schema, **dict(zip(schema, args, strict=False)), **dict(kwargs)}


def has_tensor(arg: Arg) -> bool:
    return isinstance(arg, Operand)


def named_operands(
    given: Mapping[str, Arg], names: Mapping[str, Sequence[str]], operands: LocalTypes
) -> list[Sequence[str]]:
    """The dim names of every operand: those of its argument, "" (never split) for arguments that are not named."""
    found: list[Sequence[str]] = [[""] * len(value.shape) for value in operands]
    for argument, dims in names.items():
        if isinstance(operand := given[argument], Operand):
            found[operand.position] = dims
    return found


def expanded(arg: Arg, count: int) -> tuple[int, ...]:
    """An int[] argument in full length: 1 and (1,) mean the same for every dim."""
    values = (arg,) if isinstance(arg, int) else tuple(arg)  # type: ignore[arg-type]
    return values * count if len(values) == 1 else values


def axes_of(labels: Labels, *chosen: str) -> tuple[str, ...]:
    """The axes that took one of these plain labels, in mesh order."""
    return tuple(axis for axis, label in labels.items() if plain_label(label) in chosen)


def one_axis_of(labels: Labels, label: str) -> str | None:
    """The axis that took `label`, None for none.

    Raises:
        CannotLower: several did, which the body of the operation cannot do.
    """
    axes = axes_of(labels, label)
    if len(axes) > 1:
        raise CannotLower(f"{label} can be split over one axis only, not over {' and '.join(axes)}")
    return axes[0] if axes else None


def handles(axes: Sequence[str]) -> tuple[AxisRef, ...]:
    return tuple(AxisRef(axis) for axis in axes)


def seed_over(labels: Labels, *drawn: str) -> SeedRef:
    """A seed that differs over the axes that split a drawn dim: those that took one of the labels `drawn`."""
    axes = axes_of(labels, *drawn)
    return SeedRef(
        tuple(axis for axis in axes if axis != MICROBATCH),
        is_of_step=MICROBATCH in labels and MICROBATCH not in axes,
    )


def runtime_call(target: str, given: Mapping[str, Arg], names: Sequence[str], *more: Arg) -> Call:
    """A call of a runtime function with the arguments `names`, then `more`."""
    return Call(target=target, args=(*(given[name] for name in names), *more))
