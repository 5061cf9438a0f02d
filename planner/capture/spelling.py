"""An operator with its arguments -> the node that stands for it: one spelling for every way to write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedModel
from .builder import Builder
from .graph import Arg, Ref, TensorType, refs_of
from .rewrites import REWRITES, positive, symbols

# Names of arguments that hold dims of the first tensor argument.
_DIM_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim", "dim2", "dimension", "axis")
_NEW_DIM_OPS = ("unsqueeze", "stack")


def append(
    builder: Builder,
    target: torch._ops.OpOverload,
    bound: Mapping[str, Any],
    out: tuple[TensorType, ...],
    *,
    autocast: bool,
) -> tuple[Ref, ...]:
    """Append the operation in canonical form; `bound` holds the given arguments by name.

    Raises:
        UnsupportedModel: an argument cannot stand in a plan.
    """
    op = str(target)
    if autocast:
        bound = _with_casts(builder, bound, out)
    full = {a.name: bound.get(a.name, a.default_value) for a in target._schema.arguments}
    rewrite = REWRITES.get(op)
    if rewrite is not None and (found := rewrite(builder, full, out)) is not None:
        return found
    try:
        positional, keywords = _split_arguments(target, _with_positive_dims(builder, target, bound))
    except TypeError as error:
        raise UnsupportedModel(f"{op}: {error}", where=builder.source) from error
    return builder.outputs(builder.op(op, positional, out, keywords))


def append_functional(
    builder: Builder, target: torch._ops.OpOverload, operands: Mapping[str, Any], out: TensorType, *, autocast: bool
) -> Ref:
    """Append an in-place operation in its functional form: the new value of what it writes.

    Raises:
        UnsupportedModel: it has no such form.
    """
    name = target._opname.removesuffix("_")
    if name == "copy":
        return builder.expand(builder.cast(operands["src"], out.dtype), out.shape)
    if name == "zero":
        return builder.op("aten.zeros_like.default", (operands["self"],), out)
    if name == "fill" and not isinstance(operands["value"], Ref):
        return builder.op("aten.full_like.default", (operands["self"], operands["value"]), out)
    overload = _functional(target, name)
    if (written := next((a.name for a in target._schema.arguments if a.is_out), None)) is not None:
        # `out=`: what is written is not read; results of another shape or dtype would resize it or be converted.
        given = [builder.type_of(ref) for ref in refs_of(tuple(operands.values()))]
        operands = {key: value for key, value in operands.items() if key != written}
        overload = overload if {value.dtype for value in given} == {out.dtype} else None
    if overload is None:
        raise UnsupportedModel(
            f"{target} writes in place and has no functional form", where=builder.source, fix="write it out of place"
        )
    # The two may name an argument apart: dropout_ writes `self`, dropout reads `input`.
    names = [argument.name for argument in overload._schema.arguments]
    pairs = zip(target._schema.arguments, names, strict=False)
    other = {a.name: name for a, name in pairs if a.name not in names}
    operands = {other.get(key, key): value for key, value in operands.items()}
    return builder.cast(append(builder, overload, operands, (out,), autocast=autocast)[0], out.dtype)


def _functional(target: torch._ops.OpOverload, name: str) -> torch._ops.OpOverload | None:
    """The operation of ATen that returns what `target` writes, by the same arguments."""
    name = "normal_functional" if name == "normal" else name
    packet = getattr(torch.ops.aten, name, None) if target.namespace == "aten" else None
    if packet is None:
        return None
    if target._opname.endswith("_"):
        overload = "p" if (name, target._overloadname) == ("bernoulli", "float") else target._overloadname
        return getattr(packet, overload, None)
    arguments = target._schema.arguments
    wanted = [(a.name, str(a.type)) for a in arguments if not a.is_out]
    if len(arguments) - len(wanted) != 1:
        return None
    found = (getattr(packet, overload) for overload in packet.overloads())
    return next((f for f in found if [(a.name, str(a.type)) for a in f._schema.arguments] == wanted), None)


def written_argument(target: torch._ops.OpOverload) -> str | None:
    """The argument that an in-place operation writes."""
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            return argument.name
    return None


def _with_casts(builder: Builder, bound: Mapping[str, Any], out: tuple[TensorType, ...]) -> Mapping[str, Any]:
    """Write out the casts of an autocast region: where the result's dtype is not what the operands promote to."""
    floats = [ref for ref in refs_of(tuple(bound.values())) if _is_float(builder.type_of(ref).dtype)]
    if not floats or not _is_float(out[0].dtype):
        return bound
    promoted = torch.float16
    for index, ref in enumerate(floats):
        dtype = getattr(torch, builder.type_of(ref).dtype)
        promoted = dtype if index == 0 else torch.promote_types(promoted, dtype)
    if str(promoted).removeprefix("torch.") == out[0].dtype:
        return bound

    def cast(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(cast(item) for item in arg)
        return builder.cast(arg, out[0].dtype) if isinstance(arg, Ref) and arg in floats else arg

    return {name: cast(value) for name, value in bound.items()}


def _with_positive_dims(builder: Builder, target: torch._ops.OpOverload, bound: Mapping[str, Any]) -> Mapping[str, Any]:
    first = next(iter(refs_of(tuple(bound.values()))), None)
    if first is None:
        return bound
    rank = len(builder.shape(first)) + (target._opname in _NEW_DIM_OPS)

    def fix(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | tuple):
            return value
        return positive(value, rank) if isinstance(value, int) else tuple(fix(item) for item in value)

    return {name: fix(value) if name in _DIM_ARGUMENTS else value for name, value in bound.items()}


def _split_arguments(
    target: torch._ops.OpOverload, bound: Mapping[str, Any]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """Positional arguments as far as given, then keyword-only ones that differ from their default."""
    positional: list[Arg] = []
    waiting: list[Arg] = []
    keywords: list[tuple[str, Arg]] = []
    for argument in target._schema.arguments:
        given = argument.name in bound
        value = symbols(bound[argument.name] if given else argument.default_value)
        if argument.kwarg_only:
            if (
                given
                and value is not None
                and argument.name not in ("pin_memory", "layout")
                and value != argument.default_value
            ):
                keywords.append((argument.name, value))
        elif given:
            positional.extend([*waiting, value])
            waiting = []
        else:
            waiting.append(value)
    return tuple(positional), tuple(keywords)


def _is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
