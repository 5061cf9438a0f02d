"""Canonical forms of operations: many spellings of one thing become one (docs/design.md, "Canonical form")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .builder import Builder
from .graph import Arg, Ref, Symbol, TensorType

# Arguments by name, positional and keyword, with the schema's defaults filled in.
Bound = Mapping[str, Any]
Outputs = tuple[TensorType, ...]
# Refs of the outputs, or None: leave the operation as it is.
Rewrite = Callable[[Builder, Bound, Outputs], tuple[Ref, ...] | None]

REWRITES: dict[str, Rewrite] = {}


def _rewrites(*ops: str) -> Callable[[Rewrite], Rewrite]:
    def add(function: Rewrite) -> Rewrite:
        for op in ops:
            REWRITES[op] = function
        return function

    return add


def positive(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


@_rewrites(
    "aten.contiguous.default", "aten.clone.default", "aten.alias.default", "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default", "aten.lift.default", "aten.positive.default", "aten.resolve_conj.default",
    "aten.resolve_neg.default",
)  # fmt: skip
def _identity(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    return (a["self"],)


@_rewrites("aten.detach.default", "aten.detach_.default")
def _detach(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    if not b.type_of(a["self"]).requires_grad:
        return (a["self"],)
    return (b.op("aten.detach.default", (a["self"],), out),)


@_rewrites(
    "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.to.other", "aten._to_copy.default",
    "aten.type_as.default", "aten.to.prim_Device", "aten.to.prim_dtype", "aten.to.prim_other",
    "aten._autocast_to_full_precision.default", "aten._autocast_to_reduced_precision.default",
)  # fmt: skip
def _to(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    return (b.cast(a["self"], out[0].dtype),)


@_rewrites(
    "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.flatten.using_ints",
    "aten.unflatten.int", "aten.view_as.default", "aten.reshape_as.default", "aten._reshape_alias.default",
    "aten.ravel.default",
)  # fmt: skip
def _reshape(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    return (b.reshape(a["self"], out[0].shape),)


@_rewrites("aten.expand.default", "aten.expand_as.default", "aten.broadcast_to.default")
def _expand(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    return (b.expand(a["self"], out[0].shape),)


@_rewrites("aten.broadcast_tensors.default")
def _broadcast_tensors(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    return tuple(b.expand(ref, value.shape) for ref, value in zip(a["tensors"], out, strict=True))


@_rewrites(
    "aten.chunk.default", "aten.split.Tensor", "aten.split.sizes", "aten.split.default",
    "aten.split_with_sizes.default", "aten.unsafe_split.Tensor", "aten.unsafe_chunk.default",
    "aten.unsafe_split_with_sizes.default", "aten.tensor_split.sections", "aten.tensor_split.indices",
)  # fmt: skip
def _split(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    source = a["self"]
    if len(out) == 1:
        return (source,)
    dim = positive(a["dim"], len(b.shape(source)))
    sizes = tuple(value.shape[dim] for value in out)
    return b.outputs(b.op("aten.split_with_sizes.default", (source, sizes, dim), out))


@_rewrites(
    "aten.t.default", "aten.transpose.int", "aten.numpy_T.default", "aten.mT.default", "aten.swapaxes.default",
    "aten.swapdims.default", "aten.permute.default", "aten.movedim.int", "aten.movedim.intlist",
)  # fmt: skip
def _permute(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    source = a["self"]
    rank = len(b.shape(source))
    order = _order(a, rank)
    moved = [dim for dim in range(rank) if order[dim] != dim]
    if not moved:
        return (source,)
    if len(moved) == 2:
        return (b.op("aten.transpose.int", (source, moved[0], moved[1]), out),)
    return (b.op("aten.permute.default", (source, tuple(order)), out),)


def _order(a: Bound, rank: int) -> list[int]:
    if "dims" in a:
        return [positive(dim, rank) for dim in a["dims"]]
    if "source" in a:
        sources, targets = ((d,) if isinstance(d, int) else d for d in (a["source"], a["destination"]))
        moves = {positive(t, rank): positive(s, rank) for s, t in zip(sources, targets, strict=True)}
        rest = iter([dim for dim in range(rank) if dim not in moves.values()])
        return [moves[dim] if dim in moves else next(rest) for dim in range(rank)]
    order = list(range(rank))
    if "dim0" in a or "axis0" in a:
        first, second = (a["dim0"], a["dim1"]) if "dim0" in a else (a["axis0"], a["axis1"])
        first, second = positive(first, rank), positive(second, rank)
    elif rank < 2:
        return order
    else:
        first, second = rank - 2, rank - 1
    order[first], order[second] = order[second], order[first]
    return order


@_rewrites("aten.slice.Tensor")
def _slice(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    source = a["self"]
    dim = positive(a["dim"], len(b.shape(source)))
    size = b.shape(source)[dim]
    if size == out[0].shape[dim] and a["step"] == 1:
        return (source,)
    start, end = slice_bounds(a["start"], a["end"], size)
    args = (source, dim, start, end) if a["step"] == 1 else (source, dim, start, end, a["step"])
    return (b.op("aten.slice.Tensor", args, out),)


def slice_bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


@_rewrites("aten.select.int")
def _select(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
    source = a["self"]
    dim = positive(a["dim"], len(b.shape(source)))
    return (b.op("aten.select.int", (source, dim, positive(a["index"], b.shape(source)[dim])), out),)


@_rewrites("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
def _dropout(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
    return (a["input"],) if a["p"] == 0 else None


@_rewrites("aten.linear.default")
def _linear(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
    product = b.op("aten.linear.default", (a["input"], a["weight"]), out)
    return (product if a["bias"] is None else b.op("aten.add.Tensor", (product, a["bias"]), out),)


@_rewrites("aten.addmm.default")
def _addmm(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
    if a["beta"] != 1 or a["alpha"] != 1:
        return None
    product = b.op("aten.mm.default", (a["mat1"], a["mat2"]), out)
    return (b.op("aten.add.Tensor", (product, a["self"]), out),)


def _convolution(op: str, names: tuple[str, ...]) -> None:
    @_rewrites(op)
    def rewrite(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
        args = tuple(None if name == "bias" else a[name] for name in names)
        product = b.op(op, args, out)
        if a["bias"] is None:
            return (product,)
        ones = (1,) * (len(b.shape(a["weight"])) - 2)
        bias = b.reshape(a["bias"], (*b.shape(a["bias"]), *ones))
        return (b.op("aten.add.Tensor", (product, bias), out),)


for _rank in (1, 2, 3):
    _plain = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    _convolution(f"aten.conv{_rank}d.default", _plain)
    _convolution(f"aten.conv{_rank}d.padding", _plain)
    _suffix = "input" if _rank > 1 else "default"
    _convolution(
        f"aten.conv_transpose{_rank}d.{_suffix}",
        ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    )
_convolution(
    "aten.convolution.default",
    ("input", "weight", "bias", "stride", "padding", "dilation", "transposed", "output_padding", "groups"),
)

_MEAN, _SUM = 1, 2


@_rewrites("aten.cross_entropy_loss.default", "aten.nll_loss_nd.default")
def _cross_entropy(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
    """mean -> sum / count, where every label weighs the same; the count depends on labels alone."""
    if a["reduction"] != _MEAN or a["weight"] is not None:
        return None
    target, logits = b.type_of(a["target"]), b.type_of(a["self"])
    op = "aten.nll_loss_nd.default"
    args: tuple[Arg, ...] = (a["self"], a["target"], None, _SUM, a["ignore_index"])
    if "label_smoothing" in a:
        op = "aten.cross_entropy_loss.default"
        args = (*args, a["label_smoothing"]) if a["label_smoothing"] else args
    total = b.op(op, args, out)
    if target.dtype.startswith(("float", "bfloat")):  # class probabilities: the count is the batch
        count: Arg = logits.numel // logits.shape[1 if len(logits.shape) > 1 else 0]
    else:
        kept = b.op("aten.ne.Scalar", (a["target"], a["ignore_index"]), TensorType(shape=target.shape, dtype="bool"))
        count = b.op("aten.sum.default", (kept,), TensorType(shape=(), dtype="int64"))
    return (b.op("aten.div.Tensor", (total, count), out),)


# Draws: of what they overwrite or follow only shape and dtype count


def _follows(op: str, parameters: tuple[str, ...], sized: str) -> None:
    @_rewrites(op)
    def rewrite(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...]:
        args = (*(a[name] for name in parameters), out[0].shape)
        return (b.op(sized, args, out, (("dtype", Symbol("dtype", out[0].dtype)),)),)


_follows("aten.rand_like.default", (), "aten.rand.default")
_follows("aten.randn_like.default", (), "aten.randn.default")
_follows("aten.randint_like.default", ("high",), "aten.randint.default")
_follows("aten.randint_like.low_dtype", ("low", "high"), "aten.randint.low")


def _overwrites(op: str, *parameters: str, drawn: str = "") -> None:
    @_rewrites(op)
    def rewrite(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
        if a["generator"] is not None:
            return None
        fresh = b.op("aten.empty.memory_format", (out[0].shape,), out, (("dtype", Symbol("dtype", out[0].dtype)),))
        return (b.op(drawn or op, (fresh, *(a[name] for name in parameters)), out),)


_overwrites("aten.bernoulli.p", "p")
_overwrites("aten.uniform.default", "from", "to")
_overwrites("aten.normal_functional.default", "mean", "std")
_overwrites("aten.normal.float_float", "mean", "std", drawn="aten.normal_functional.default")
_overwrites("aten.exponential.default", "lambd")
_overwrites("aten.random.default")
_overwrites("aten.random.from", "from", "to")
_overwrites("aten.random.to", "to")
_overwrites("aten.geometric.default", "p")
_overwrites("aten.cauchy.default", "median", "sigma")
_overwrites("aten.log_normal.default", "mean", "std")


@_rewrites("aten.bernoulli.Tensor")
def _bernoulli(b: Builder, a: Bound, out: Outputs) -> tuple[Ref, ...] | None:
    if a["generator"] is not None:
        return None
    probability = b.expand(a["p"], out[0].shape)
    drawn = b.op("aten.bernoulli.default", (probability,), b.type_of(probability))
    return (b.cast(drawn, out[0].dtype),)


def symbols(value: object) -> Arg:
    """A torch constant or a container as an argument of a node.

    Raises:
        TypeError: a value that arguments cannot hold.
    """
    import torch

    if isinstance(value, list | tuple):
        return tuple(symbols(item) for item in value)
    if value is None or isinstance(value, bool | int | float | complex | str | Ref):
        return value
    if isinstance(value, torch.dtype):
        return Symbol("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return Symbol("device", "")  # the device the module runs on
    if isinstance(value, torch.memory_format):
        return Symbol("memory_format", str(value).removeprefix("torch."))
    if isinstance(value, torch.layout):
        return Symbol("layout", str(value).removeprefix("torch."))
    raise TypeError(f"cannot hold {type(value).__name__} as an argument")
