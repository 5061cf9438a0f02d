"""Arguments of local operations as source text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ....planner.capture.graph import Symbol
from ....planner.sharding.rules import AxisRef, Operand, SeedRef
from ...source import ATOM, Expr
from ...text import literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What arguments other than operands are called where the expression will stand.

    `free_dims`: dims of the result that depend on the batch; a reshape writes -1 for one of them.
    """

    axes: Mapping[str, str]
    seed: Callable[[SeedRef], str]
    training: str = "self.training"
    device: str = "device"
    free_dims: tuple[int, ...] = ()


def argument(arg: object, operands: Sequence[Expr], context: Context) -> str:
    match arg:
        case Operand():
            return operands[arg.position].text
        case Symbol(kind="training"):
            return context.training
        case Symbol(kind="device"):
            return context.device
        case Symbol():
            return f"torch.{arg.name.removeprefix('torch.')}"
        case AxisRef():
            return context.axes.get(arg.name, "None")
        case SeedRef():
            return context.seed(arg)
        case tuple():
            inner = ", ".join(argument(item, operands, context) for item in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        case _:
            return literal(arg)


def arguments(args: Sequence[object], kwargs: Mapping[str, object], operands: Sequence[Expr], context: Context) -> str:
    found = [argument(arg, operands, context) for arg in args]
    found += [f"{name}={argument(value, operands, context)}" for name, value in kwargs.items()]
    return ", ".join(found)


def receiver(arg: object, operands: Sequence[Expr]) -> str:
    assert isinstance(arg, Operand)
    return operands[arg.position].at(ATOM)
