"""Operations that Python has a sign or a subscript for, and those whose arguments it takes in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....planner.capture.graph import Symbol
from ....planner.sharding.rules import Operand
from ...source import ADD, ATOM, BIT_AND, BIT_OR, BIT_XOR, COMPARE, MULTIPLY, UNARY, Expr
from ...text import literal
from .arguments import Context, argument, arguments, receiver

END = 2**63 - 1
# aten name -> operator and its strength
BINARY: Mapping[str, tuple[str, int]] = {
    "add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MULTIPLY), "div": ("/", MULTIPLY),
    "floor_divide": ("//", MULTIPLY), "remainder": ("%", MULTIPLY),
    "matmul": ("@", MULTIPLY), "mm": ("@", MULTIPLY), "bmm": ("@", MULTIPLY),
    "bitwise_and": ("&", BIT_AND), "bitwise_or": ("|", BIT_OR), "bitwise_xor": ("^", BIT_XOR),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}  # fmt: skip

# A special form: (args, kwargs, operands, context) -> its expression, or None to go the common way.
Special = Callable[[Sequence[object], dict[str, object], Sequence[Expr], Context], Expr | None]


def _binary(sign: str, strength: int) -> Special:
    def write(
        args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
    ) -> Expr | None:
        if len(args) != 2 or kwargs.get("alpha", 1) != 1 or kwargs.get("rounding_mode") is not None:
            return None
        left, right = (_operand(arg, operands, context) for arg in args)
        # Comparisons do not chain, and a - (b + c) is not a - b + c.
        return Expr(f"{left.at(strength + (strength == COMPARE))} {sign} {right.at(strength + 1)}", strength)

    return write


def _operand(arg: object, operands: Sequence[Expr], context: Context) -> Expr:
    if isinstance(arg, Operand):
        return operands[arg.position]
    text = argument(arg, operands, context)
    return Expr(text, UNARY if text.startswith("-") else ATOM)


def _negative(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    return Expr(f"-{_operand(args[0], operands, context).at(UNARY)}", UNARY)


def _reversed_subtraction(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    if len(args) != 2 or kwargs:
        return None
    right, left = (_operand(arg, operands, context) for arg in args)
    return Expr(f"{left.at(ADD)} - {right.at(MULTIPLY)}", ADD)


def _slice(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    dim, start, end, step = (*args[1:], *(0, None, None, 1)[len(args) - 1 :])
    if not isinstance(dim, int) or dim < 0 or dim > 3 or not all(isinstance(v, int | None) for v in (start, end, step)):
        return None
    first = f"{start}" if start else ""
    last = f"{end}" if end is not None and end != END else ""
    part = f"{first}:{last}" + (f":{step}" if step not in (None, 1) else "")
    return Expr(f"{receiver(args[0], operands)}[{':, ' * dim}{part}]")


def _select(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    dim, index = args[1:3]
    if not isinstance(dim, int) or dim < 0 or dim > 3:
        return None
    return Expr(f"{receiver(args[0], operands)}[{':, ' * dim}{index}]")


def _split(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    sizes = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    assert isinstance(sizes, tuple)
    if len(set(sizes)) == 1:
        return Expr(f"{receiver(args[0], operands)}.chunk({len(sizes)}, dim={dim})")
    return Expr(f"{receiver(args[0], operands)}.split({literal(sizes)}, dim={dim})")


def _to(args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context) -> Expr | None:
    dtypes = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, Symbol) and arg.kind == "dtype"]
    if len(dtypes) != 1:
        return Expr(f"{receiver(args[0], operands)}.clone()")
    return Expr(f"{receiver(args[0], operands)}.to({argument(dtypes[0], operands, context)})")


def _index(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    indices = args[1]
    assert isinstance(indices, tuple)
    inner = ", ".join(":" if index is None else argument(index, operands, context) for index in indices)
    return Expr(f"{receiver(args[0], operands)}[{inner}]")


def _einsum(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    equation, tensors = args[0], args[1]
    assert isinstance(tensors, tuple)
    return Expr(f"torch.einsum({arguments((equation, *tensors), {}, operands, context)})")


def _tensors_one_by_one(name: str) -> Special:
    """Functions that take their tensors as arguments, where aten has a list."""

    def write(
        args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
    ) -> Expr | None:
        assert isinstance(args[0], tuple)
        return Expr(f"torch.{name}({arguments(args[0], kwargs, operands, context)})")

    return write


SPECIAL: Mapping[str, Special] = {
    **{name: _binary(sign, strength) for name, (sign, strength) in BINARY.items()},
    "neg": _negative,
    "rsub": _reversed_subtraction,
    "slice": _slice,
    "select": _select,
    "split_with_sizes": _split,
    "to": _to,
    "_to_copy": _to,
    "index": _index,
    "einsum": _einsum,
    **{name: _tensors_one_by_one(name) for name in ("broadcast_tensors", "meshgrid", "block_diag", "cartesian_prod")},
}
