"""Local operations as PyTorch code: a Call and the source of its operands -> one expression as a person would write it.

Operators and methods where Python has them, `F.*` with keywords where PyTorch documents them, `torch.ops.aten.*` else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ....planner.capture.graph import Symbol
from ....planner.errors import AutoparError
from ....planner.sharding.rules import AxisRef, Call, Operand, SeedRef
from ...source import MULTIPLY, Expr
from .arguments import Context, argument, arguments, receiver
from .runtime_source import runtime
from .special_forms import SPECIAL
from .tensors import DEFAULT_DTYPE
from .torch_functions import FUNCTIONS, REDUCTIONS, REQUIRED, Function

# Arguments that say where and how memory lies: the emitted code follows its inputs.
DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")


# Methods that take their sizes or dims one by one.
SPREAD = ("reshape", "view", "expand", "permute", "repeat")
# Methods whose documented keywords are written by name.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "sum": ("dim", "keepdim"), "mean": ("dim", "keepdim"), "amax": ("dim", "keepdim"), "amin": ("dim", "keepdim"),
    "any": ("dim", "keepdim"), "all": ("dim", "keepdim"), "argmax": ("dim", "keepdim"), "argmin": ("dim", "keepdim"),
    "logsumexp": ("dim", "keepdim"), "cumsum": ("dim",),
}  # fmt: skip
FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "logspace", "scalar_tensor", "tril_indices",
             "triu_indices", "rand", "randn", "randint", "randperm")  # fmt: skip
# Draws that Python has as methods which overwrite: what they are given is fresh.
OVERWRITES: Mapping[str, str] = {
    "bernoulli.p": "bernoulli_", "uniform.default": "uniform_", "normal_functional.default": "normal_",
    "exponential.default": "exponential_", "random.default": "random_", "random.from": "random_",
    "random.to": "random_", "geometric.default": "geometric_", "cauchy.default": "cauchy_",
    "log_normal.default": "log_normal_",
}  # fmt: skip
# Names whose Python method or function is not the operation of the same name.
ONLY_ATEN = frozenset({"norm", "split", "unique", "stft", "istft", "lu", "to", "item", "copy", "set", "resize", "new"})


def _is_method(name: str, overload: str) -> bool:
    """Whether the first argument is what a method is called on, unlike the condition of `where`."""
    schema = getattr(getattr(torch.ops.aten, name), overload)._schema
    return hasattr(torch.Tensor, name) and schema.arguments[0].name == "self"


def _makes_default_dtype(name: str, args: Sequence[object]) -> bool:
    """Whether the factory makes floats of the default dtype unless it is told another one."""
    if name == "full":
        return isinstance(args[1], float)
    return name in ("zeros", "ones", "empty", "eye", "linspace", "logspace", "rand", "randn")


def render(call: Call, operands: Sequence[Expr], context: Context) -> Expr:
    """The expression of a call.

    Raises:
        AutoparError: an operation of another library, which the emitted package could not import.
    """
    expr = _render(call, operands, context)
    expr = Expr(expr.text, expr.strength, sum(operand.weight for operand in operands) + 1)
    if call.divide_by != 1:
        expr = Expr(f"{expr.at(MULTIPLY)} / {call.divide_by}", MULTIPLY, expr.weight + 1)
    return expr


def _render(call: Call, operands: Sequence[Expr], context: Context) -> Expr:
    namespace, _, rest = call.target.partition(".")
    if not rest:
        return _runtime_call(call, operands, context)
    if namespace != "aten":
        raise AutoparError(
            f"{call.target} is no operation of PyTorch",
            fix="express it with PyTorch operations, the emitted package imports nothing else",
        )
    name, _, overload = rest.rpartition(".")
    kwargs = {key: value for key, value in call.kwargs if key not in DROPPED}
    if isinstance(seed := kwargs.get("seed"), SeedRef):
        drawn = _render(
            replace(call, kwargs=tuple(item for item in call.kwargs if item[0] != "seed")), operands, context
        )
        return Expr(f"seeded_draw(lambda: {drawn.text}, {context.seed(seed)}, {context.device})")
    if method := OVERWRITES.get(f"{name}.{overload}"):
        return _method(method, call.args, kwargs, operands, context)
    special = SPECIAL.get(name)
    if special is not None and (found := special(call.args, kwargs, operands, context)) is not None:
        return found
    if name in FUNCTIONS:
        return _function(FUNCTIONS[name], call.args, kwargs, operands, context)
    if name in FACTORIES:
        if kwargs.get("dtype") == Symbol("dtype", DEFAULT_DTYPE) and _makes_default_dtype(name, call.args):
            del kwargs["dtype"]
        where = arguments(call.args, kwargs, operands, context)
        return Expr(f"torch.{name}({where}, device={context.device})" if where else f"torch.{name}()")
    public = not name.startswith("_") and name not in ONLY_ATEN
    if public and call.args and isinstance(call.args[0], Operand) and _is_method(name, overload):
        return _method(name, call.args, kwargs, operands, context)
    if public and hasattr(torch, name):
        kwargs = _with_reduction(name, overload, call.args, kwargs)
        return Expr(f"torch.{name}({arguments(call.args, kwargs, operands, context)})")
    return Expr(f"torch.ops.aten.{name}.{overload}({arguments(call.args, kwargs, operands, context)})")


def _with_reduction(name: str, overload: str, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, object]:
    """The reduction of a loss written out: left out, functions of `torch` take "none", and their operations "mean"."""
    parameters = [a.name for a in getattr(getattr(torch.ops.aten, name), overload)._schema.arguments]
    if "reduction" not in parameters[len(args) :]:
        return kwargs
    return {"reduction": 1, **kwargs}


def _runtime_call(call: Call, operands: Sequence[Expr], context: Context) -> Expr:
    """Tensors by position; from the first other argument on by name, without those that are its defaults."""
    parameters = runtime().definitions[call.target].parameters
    parts: list[str] = []
    by_name = False
    for (name, default), arg in zip(parameters, call.args, strict=False):
        by_name = by_name or not isinstance(arg, Operand | AxisRef | SeedRef)
        if not by_name:
            parts.append(argument(arg, operands, context))
        elif default is ... or arg != default:
            parts.append(f"{name}={argument(arg, operands, context)}")
    parts += [f"{name}={argument(value, operands, context)}" for name, value in call.kwargs]
    if any(isinstance(value, SeedRef) for _, value in call.kwargs):
        # Attention has no flag for it: its dropout is the one of training, as everywhere.
        parts = [f"{part} if {context.training} else 0.0" if part.startswith("dropout_p=") else part for part in parts]
    return Expr(f"{call.target}({', '.join(parts)})")


def _function(
    function: Function, args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr:
    names = list(function.parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    order = [names[position] for position in function.order] or [
        name for name in names if function.parameters[name] is REQUIRED
    ]
    parts: list[str] = []
    # Weight and bias read best by position as long as nothing is skipped before them.
    by_position = True
    for name in [*order, *(name for name in names if name not in order)]:
        default = function.parameters[name]
        value = _plain(given.get(name, default), one_number=name in function.pairs)
        if value is REQUIRED:
            continue
        if default is not REQUIRED and (value == default or value == ()):
            by_position = False
            continue
        if name == "reduction":
            value = REDUCTIONS[int(str(value))]
        text = argument(value, operands, context)
        positional = default is REQUIRED or (by_position and default is None and name in ("weight", "bias"))
        parts.append(text if positional else f"{name}={text}")
    return Expr(f"{function.name}({', '.join(parts)})")


def _plain(value: object, *, one_number: bool) -> object:
    if one_number and isinstance(value, tuple) and value and all(item == value[0] for item in value):
        return value[0]
    return value


def _method(
    name: str, args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr:
    text = receiver(args[0], operands)
    rest = list(args[1:])
    if name in SPREAD and len(rest) == 1 and isinstance(rest[0], tuple) and rest[0]:
        rest = list(_free(rest[0], context) if name in ("reshape", "view") else rest[0])
    if name in KEYWORDS:
        names = KEYWORDS[name]
        kwargs = {**dict(zip(names, rest, strict=False)), **kwargs}
        rest = rest[len(names) :]
        kwargs = {key: _single(value) for key, value in kwargs.items() if value not in (False, None, ())}
    return Expr(f"{text}.{name}({arguments(rest, kwargs, operands, context)})")


def _single(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], int) else value


def _free(sizes: tuple[object, ...], context: Context) -> tuple[object, ...]:
    """The sizes of a reshape with -1 for the dim that depends on the batch."""
    dims = [dim for dim in context.free_dims if dim < len(sizes)]
    if not dims or 0 in sizes or -1 in sizes:
        return sizes
    return (*sizes[: dims[0]], -1, *sizes[dims[0] + 1 :])
