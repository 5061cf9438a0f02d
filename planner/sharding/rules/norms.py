"""Layer, RMS and group norm: dims outside the statistics are free; a split of the dims inside exchanges statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from ..placement import split
from ..redistribute import CollectiveUse
from .factors import factor_options, numbered_dims, run_option, size_of
from .registry import Call, Labels, LocalTypes, OpRule, Option, Saved, plain_label, register, same_call
from .schema import arguments, axes_of, handles, has_tensor, named_operands, runtime_call

LAYER: Mapping[str, Arg] = {"input": None, "normalized_shape": (), "weight": None, "bias": None, "eps": 1e-5}
RMS: Mapping[str, Arg] = {"input": None, "normalized_shape": (), "weight": None, "eps": None}
GROUP: Mapping[str, Arg] = {"input": None, "num_groups": 1, "weight": None, "bias": None, "eps": 1e-5}


def _schema(node: Node) -> Mapping[str, Arg]:
    return LAYER if node.op == "aten.layer_norm.default" else RMS


def _num_normalised(node: Node) -> int:
    return len(arguments(node, _schema(node))["normalized_shape"])  # type: ignore[arg-type]


def _inside(node: Node) -> tuple[str, ...]:
    """Labels of the normalised dims."""
    count = len(node.output.shape)
    return tuple(f"d{i}" for i in range(count - _num_normalised(node), count))


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given, inside = arguments(node, _schema(node)), _inside(node)
    dims = numbered_dims(node.output.shape)
    names = {name: inside for name in ("weight", "bias") if name in given}
    found = factor_options(named_operands(given, {"input": dims, **names}, operands), [dims], operands, node.outputs)
    return tuple(replace(option, runs_collectives=option.label in inside) for option in found)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    axes = axes_of(labels, *_inside(node))
    if not axes:
        return same_call(node, labels, outputs, sizes)
    given = {**arguments(node, _schema(node)), "normalized_shape": _num_normalised(node)}
    target = "layer_norm_split" if node.op == "aten.layer_norm.default" else "rms_norm_split"
    return runtime_call(target, given, list(_schema(node)), handles(axes))


def _collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    if plain_label(label) not in _inside(node):
        return ()
    rows = operands[0].numel // prod(operands[0].shape[-_num_normalised(node) :])
    if node.op == "aten.layer_norm.default":
        return _statistics(operands, rows, axis, size)
    dtype = _wide(operands)
    phases = ("forward", "backward") if _has_gradient(operands) else ("forward",)
    num_bytes = rows * ITEM_BYTES[dtype]
    return tuple(
        CollectiveUse(op="all_reduce", axis=axis, num_bytes=num_bytes, phase=phase, dtype=dtype) for phase in phases
    )


def _statistics(operands: LocalTypes, rows: int, axis: str, size: int) -> tuple[CollectiveUse, ...]:
    """Mean and variance are gathered forward, two sums are reduced backward."""
    dtype = _wide(operands)
    num_bytes = 2 * rows * ITEM_BYTES[dtype]
    forward = CollectiveUse(op="all_gather", axis=axis, num_bytes=size * num_bytes, phase="forward", dtype=dtype)
    backward = CollectiveUse(op="all_reduce", axis=axis, num_bytes=num_bytes, phase="backward", dtype=dtype)
    return (forward, backward) if _has_gradient(operands) else (forward,)


def _wide(operands: LocalTypes) -> str:
    """Statistics of narrow types are float32."""
    return "float64" if operands[0].dtype == "float64" else "float32"


def _has_gradient(operands: LocalTypes) -> bool:
    return any(value.requires_grad for value in operands)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """One kernel forward; backward one for the input's gradient and one for those of weight and bias."""
    x = operands[0]
    backward = Pass()
    if x.requires_grad:
        backward += Pass(flops=9 * x.numel, bytes=3 * x.num_bytes, kernels=1)
    if any(value.requires_grad for value in operands[1:]):
        backward += Pass(flops=4 * x.numel, bytes=2 * x.num_bytes, kernels=1)
    forward = Pass(flops=7 * x.numel, bytes=x.num_bytes + outputs[0].num_bytes, kernels=1)
    return Work(forward=forward, backward=backward, dtype=x.dtype)


def _saved(node: Node) -> Saved:
    given = arguments(node, _schema(node))
    statistics = 2 if node.op == "aten.layer_norm.default" else 1
    rows = node.output.numel // prod(node.output.shape[-_num_normalised(node) :])
    weight = (1,) if has_tensor(given["weight"]) else ()
    return Saved(operands=(0, *weight), extra_bytes=4 * statistics * rows)


def _steps_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """On the CPU RMS norm is made of float32 steps, which keep what is scaled and the result of it, too."""
    plain = _saved(node)
    x = operands[0]
    if node.op == "aten.layer_norm.default":
        return plain
    wide = x.numel * ITEM_BYTES[_wide(operands)]
    upcast = wide if x.dtype != _wide(operands) else 0
    scaled = wide if len(plain.operands) > 1 and operands[1].requires_grad else 0
    kept = plain.operands[1:] if upcast else plain.operands
    return replace(plain, operands=kept, extra_bytes=plain.extra_bytes + upcast + scaled)


def _split_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """Split statistics are kept as a mean and a scale, also where the mean is zero."""
    rows = node.output.numel // prod(node.output.shape[-_num_normalised(node) :])
    return replace(_saved(node), extra_bytes=2 * rows * ITEM_BYTES[_wide(operands)])


def _group_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Samples, whole groups of channels, and the dims behind the channels, which take part in the statistics."""
    given = arguments(node, GROUP)
    dims = numbered_dims(node.output.shape, never=(1,))
    found = factor_options(named_operands(given, {"input": dims}, operands), [dims], operands, node.outputs)
    inside = tuple(replace(option, runs_collectives=option.label != "d0") for option in found)
    places = [split(1), *[split(0)] * (len(operands) - 1)]
    groups = int(given["num_groups"])  # type: ignore[call-overload]
    return (*inside, run_option("g", groups, places, [split(1)])) if groups > 1 else inside


def _group_inside(node: Node) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(2, len(node.output.shape)))


def _group_localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    given = arguments(node, GROUP)
    given["num_groups"] = int(given["num_groups"]) // size_of("g", labels, sizes)  # type: ignore[call-overload]
    if axes := axes_of(labels, *_group_inside(node)):
        return runtime_call("group_norm_split", given, list(GROUP), handles(axes))
    return Call(target=node.op, args=tuple(given.values()))


def _group_collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    if plain_label(label) not in _group_inside(node):
        return ()
    given = arguments(node, GROUP)
    channels = node.output.shape[1] // int(given["num_groups"])  # type: ignore[call-overload]
    return _statistics(operands, operands[0].shape[0] * operands[0].shape[1] // channels, axis, size)


def _group_saved(node: Node) -> Saved:
    given = arguments(node, GROUP)
    weight = (1,) if has_tensor(given["weight"]) else ()
    channels = node.output.shape[1]
    groups = min(int(given["num_groups"]), channels)  # type: ignore[call-overload]
    return Saved(operands=(0, *weight), extra_bytes=2 * 4 * node.output.shape[0] * groups)


register(
    OpRule(
        ops=("aten.layer_norm.default", "aten.rms_norm.default"),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"cpu": _steps_saved, "layer_norm_split": _split_saved, "rms_norm_split": _split_saved},
        collectives=_collectives,
        localise=_localise,
    )
)
register(
    OpRule(
        ops=("aten.group_norm.default",),
        options=_group_options,
        work=_work,
        saved=_group_saved,
        collectives=_group_collectives,
        localise=_group_localise,
    )
)
