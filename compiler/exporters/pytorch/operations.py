"""Local operations as PyTorch code: a Call and the source of its operands -> one expression as a person would write it.

Operators and methods where Python has them, `F.*` with keywords where PyTorch documents them, `torch.ops.aten.*` else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ....planner.capture.graph import Symbol
from ....planner.errors import AutoparError
from ....planner.sharding.rules import AxisRef, Call, Operand, SeedRef
from ...source import ADD, ATOM, BIT_AND, BIT_OR, BIT_XOR, COMPARE, MULTIPLY, UNARY, Expr, literal
from .runtime_source import runtime

# Arguments that say where and how memory lies: the emitted code follows its inputs.
DROPPED = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "copy")
END = 2**63 - 1


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


# aten name -> operator and its strength
BINARY: Mapping[str, tuple[str, int]] = {
    "add": ("+", ADD), "sub": ("-", ADD), "mul": ("*", MULTIPLY), "div": ("/", MULTIPLY),
    "floor_divide": ("//", MULTIPLY), "remainder": ("%", MULTIPLY),
    "matmul": ("@", MULTIPLY), "mm": ("@", MULTIPLY), "bmm": ("@", MULTIPLY),
    "bitwise_and": ("&", BIT_AND), "bitwise_or": ("|", BIT_OR), "bitwise_xor": ("^", BIT_XOR),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE), "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}  # fmt: skip

REQUIRED = object()
REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A Python function with documented keywords.

    `parameters`: in aten's order, name -> default (REQUIRED: written by position).
    `order`: positions of aten arguments that are written first, where Python's order differs.
    """

    name: str
    parameters: Mapping[str, object]
    order: tuple[int, ...] = ()
    pairs: tuple[str, ...] = field(default=())  # written as one number where all entries are equal


def _loss(name: str, **more: object) -> Function:
    return Function(name=name, parameters={"input": REQUIRED, "target": REQUIRED, **more})


def _convolution(name: str) -> Function:
    spatial = {"stride": 1, "padding": 0, "dilation": 1}
    parameters = {"input": REQUIRED, "weight": REQUIRED, "bias": None, **spatial, "groups": 1}
    return Function(name=name, parameters=parameters, pairs=tuple(spatial))


def _max_pool(name: str) -> Function:
    window = {"kernel_size": REQUIRED, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
    return Function(name=name, parameters={"input": REQUIRED, **window}, pairs=tuple(window))


def _avg_pool(name: str) -> Function:
    window = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
    more = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None}
    return Function(name=name, parameters={"input": REQUIRED, **window, **more}, pairs=tuple(window))


def _unary(name: str, **more: object) -> Function:
    return Function(name=name, parameters={"input": REQUIRED, **more})


FUNCTIONS: Mapping[str, Function] = {
    "linear": Function(name="F.linear", parameters={"input": REQUIRED, "weight": REQUIRED, "bias": None}),
    "embedding": Function(
        name="F.embedding",
        parameters={
            "weight": REQUIRED, "input": REQUIRED, "padding_idx": -1, "scale_grad_by_freq": False, "sparse": False,
        },
        order=(1, 0),
    ),  # fmt: skip
    "layer_norm": Function(
        name="F.layer_norm",
        parameters={"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "rms_norm": Function(
        name="F.rms_norm", parameters={"input": REQUIRED, "normalized_shape": REQUIRED, "weight": None, "eps": None}
    ),
    "group_norm": Function(
        name="F.group_norm",
        parameters={"input": REQUIRED, "num_groups": REQUIRED, "weight": None, "bias": None, "eps": 1e-5},
    ),
    "batch_norm": Function(
        name="F.batch_norm",
        parameters={
            "input": REQUIRED, "weight": None, "bias": None, "running_mean": REQUIRED, "running_var": REQUIRED,
            "training": False, "momentum": 0.1, "eps": 1e-5,
        },
        order=(0, 3, 4),
    ),  # fmt: skip
    "scaled_dot_product_attention": Function(
        name="F.scaled_dot_product_attention",
        parameters={
            "query": REQUIRED, "key": REQUIRED, "value": REQUIRED, "attn_mask": None, "dropout_p": 0.0,
            "is_causal": False, "scale": None, "enable_gqa": False,
        },
    ),  # fmt: skip
    "cross_entropy_loss": _loss(
        "F.cross_entropy", weight=None, reduction=1, ignore_index=-100, label_smoothing=0.0
    ),
    "nll_loss_nd": _loss("F.nll_loss", weight=None, reduction=1, ignore_index=-100),
    "nll_loss": _loss("F.nll_loss", weight=None, reduction=1, ignore_index=-100),
    "mse_loss": _loss("F.mse_loss", reduction=1),
    "l1_loss": _loss("F.l1_loss", reduction=1),
    "smooth_l1_loss": _loss("F.smooth_l1_loss", reduction=1, beta=1.0),
    "huber_loss": _loss("F.huber_loss", reduction=1, delta=1.0),
    "binary_cross_entropy": _loss("F.binary_cross_entropy", weight=None, reduction=1),
    "binary_cross_entropy_with_logits": _loss(
        "F.binary_cross_entropy_with_logits", weight=None, pos_weight=None, reduction=1
    ),
    "kl_div": _loss("F.kl_div", reduction=1, log_target=False),
    "conv1d": _convolution("F.conv1d"),
    "conv2d": _convolution("F.conv2d"),
    "conv3d": _convolution("F.conv3d"),
    "max_pool1d": _max_pool("F.max_pool1d"),
    "max_pool2d": _max_pool("F.max_pool2d"),
    "max_pool3d": _max_pool("F.max_pool3d"),
    "avg_pool1d": _avg_pool("F.avg_pool1d"),
    "avg_pool2d": _avg_pool("F.avg_pool2d"),
    "avg_pool3d": _avg_pool("F.avg_pool3d"),
    "adaptive_avg_pool1d": Function(
        name="F.adaptive_avg_pool1d", parameters={"input": REQUIRED, "output_size": REQUIRED}, pairs=("output_size",)
    ),
    "adaptive_avg_pool2d": Function(
        name="F.adaptive_avg_pool2d", parameters={"input": REQUIRED, "output_size": REQUIRED}, pairs=("output_size",)
    ),
    "gelu": _unary("F.gelu", approximate="none"),
    "relu": _unary("F.relu"),
    "silu": _unary("F.silu"),
    "leaky_relu": _unary("F.leaky_relu", negative_slope=0.01),
    "elu": _unary("F.elu", alpha=1.0, scale=1, input_scale=1),
    "softplus": _unary("F.softplus", beta=1, threshold=20),
    "mish": _unary("F.mish"),
    "hardswish": _unary("F.hardswish"),
    "log_sigmoid": _unary("F.logsigmoid"),
    "softmax": Function(name="F.softmax", parameters={"input": REQUIRED, "dim": None, "dtype": None}),
    "log_softmax": Function(name="F.log_softmax", parameters={"input": REQUIRED, "dim": None, "dtype": None}),
    "one_hot": _unary("F.one_hot", num_classes=-1),
    "pad": Function(name="F.pad", parameters={"input": REQUIRED, "pad": REQUIRED, "mode": "constant", "value": None}),
    "constant_pad_nd": Function(name="F.pad", parameters={"input": REQUIRED, "pad": REQUIRED, "value": 0}),
    "cat": Function(name="torch.cat", parameters={"tensors": REQUIRED, "dim": 0}),
    "stack": Function(name="torch.stack", parameters={"tensors": REQUIRED, "dim": 0}),
}  # fmt: skip

# Methods that take their sizes or dims one by one.
SPREAD = ("reshape", "view", "expand", "permute", "repeat")
# Methods whose documented keywords are written by name.
KEYWORDS: Mapping[str, tuple[str, ...]] = {
    "sum": ("dim", "keepdim"), "mean": ("dim", "keepdim"), "amax": ("dim", "keepdim"), "amin": ("dim", "keepdim"),
    "any": ("dim", "keepdim"), "all": ("dim", "keepdim"), "argmax": ("dim", "keepdim"), "argmin": ("dim", "keepdim"),
    "logsumexp": ("dim", "keepdim"), "cumsum": ("dim",),
}  # fmt: skip
FACTORIES = ("arange", "zeros", "ones", "full", "empty", "eye", "linspace", "logspace", "scalar_tensor", "tril_indices",
             "triu_indices")  # fmt: skip
# Names whose Python method or function is not the operation of the same name.
ONLY_ATEN = frozenset({"norm", "split", "unique", "stft", "istft", "lu", "to", "item", "copy", "set", "resize", "new"})


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
    special = SPECIAL.get(name)
    if special is not None and (found := special(call.args, kwargs, operands, context)) is not None:
        return found
    if name in FUNCTIONS:
        return _function(FUNCTIONS[name], call.args, kwargs, operands, context)
    if name in FACTORIES:
        where = _arguments(call.args, kwargs, operands, context)
        return Expr(f"torch.{name}({where}, device={context.device})" if where else f"torch.{name}()")
    public = not name.startswith("_") and name not in ONLY_ATEN
    if public and call.args and isinstance(call.args[0], Operand) and hasattr(torch.Tensor, name):
        return _method(name, call.args, kwargs, operands, context)
    if public and hasattr(torch, name):
        return Expr(f"torch.{name}({_arguments(call.args, kwargs, operands, context)})")
    return Expr(f"torch.ops.aten.{name}.{overload}({_arguments(call.args, kwargs, operands, context)})")


def _argument(arg: object, operands: Sequence[Expr], context: Context) -> str:
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
            inner = ", ".join(_argument(item, operands, context) for item in arg)
            return f"({inner},)" if len(arg) == 1 else f"({inner})"
        case _:
            return literal(arg)


def _arguments(args: Sequence[object], kwargs: Mapping[str, object], operands: Sequence[Expr], context: Context) -> str:
    found = [_argument(arg, operands, context) for arg in args]
    found += [f"{name}={_argument(value, operands, context)}" for name, value in kwargs.items()]
    return ", ".join(found)


def _runtime_call(call: Call, operands: Sequence[Expr], context: Context) -> Expr:
    """Tensors by position; from the first other argument on by name, without those that are its defaults."""
    parameters = runtime().definitions[call.target].parameters
    parts: list[str] = []
    by_name = False
    for (name, default), arg in zip(parameters, call.args, strict=False):
        by_name = by_name or not isinstance(arg, Operand | AxisRef | SeedRef)
        if not by_name:
            parts.append(_argument(arg, operands, context))
        elif default is ... or arg != default:
            parts.append(f"{name}={_argument(arg, operands, context)}")
    parts += [f"{name}={_argument(value, operands, context)}" for name, value in call.kwargs]
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
        text = _argument(value, operands, context)
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
    receiver = _receiver(args[0], operands)
    rest = list(args[1:])
    if name in SPREAD and len(rest) == 1 and isinstance(rest[0], tuple):
        rest = list(_free(rest[0], context) if name in ("reshape", "view") else rest[0])
    if name in KEYWORDS:
        names = KEYWORDS[name]
        kwargs = {**dict(zip(names, rest, strict=False)), **kwargs}
        rest = rest[len(names) :]
        kwargs = {key: _single(value) for key, value in kwargs.items() if value not in (False, None, ())}
    return Expr(f"{receiver}.{name}({_arguments(rest, kwargs, operands, context)})")


def _receiver(arg: object, operands: Sequence[Expr]) -> str:
    assert isinstance(arg, Operand)
    return operands[arg.position].at(ATOM)


def _single(value: object) -> object:
    return value[0] if isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], int) else value


def _free(sizes: tuple[object, ...], context: Context) -> tuple[object, ...]:
    """The sizes of a reshape with -1 for the dim that depends on the batch."""
    dims = [dim for dim in context.free_dims if dim < len(sizes)]
    if not dims or 0 in sizes or -1 in sizes:
        return sizes
    return (*sizes[: dims[0]], -1, *sizes[dims[0] + 1 :])


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
    text = _argument(arg, operands, context)
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
    return Expr(f"{_receiver(args[0], operands)}[{':, ' * dim}{part}]")


def _select(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    dim, index = args[1:3]
    if not isinstance(dim, int) or dim < 0 or dim > 3:
        return None
    return Expr(f"{_receiver(args[0], operands)}[{':, ' * dim}{index}]")


def _split(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    sizes = args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    assert isinstance(sizes, tuple)
    if len(set(sizes)) == 1:
        return Expr(f"{_receiver(args[0], operands)}.chunk({len(sizes)}, dim={dim})")
    return Expr(f"{_receiver(args[0], operands)}.split({literal(sizes)}, dim={dim})")


def _to(args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context) -> Expr | None:
    dtypes = [arg for arg in (*args[1:], *kwargs.values()) if isinstance(arg, Symbol) and arg.kind == "dtype"]
    if len(dtypes) != 1:
        return Expr(f"{_receiver(args[0], operands)}.clone()")
    return Expr(f"{_receiver(args[0], operands)}.to({_argument(dtypes[0], operands, context)})")


def _index(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    indices = args[1]
    assert isinstance(indices, tuple)
    inner = ", ".join(":" if index is None else _argument(index, operands, context) for index in indices)
    return Expr(f"{_receiver(args[0], operands)}[{inner}]")


def _einsum(
    args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
) -> Expr | None:
    equation, tensors = args[0], args[1]
    assert isinstance(tensors, tuple)
    return Expr(f"torch.einsum({_arguments((equation, *tensors), {}, operands, context)})")


def _tensors_one_by_one(name: str) -> Special:
    """Functions that take their tensors as arguments, where aten has a list."""

    def write(
        args: Sequence[object], kwargs: dict[str, object], operands: Sequence[Expr], context: Context
    ) -> Expr | None:
        assert isinstance(args[0], tuple)
        return Expr(f"torch.{name}({_arguments(args[0], kwargs, operands, context)})")

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
