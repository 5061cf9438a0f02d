"""Batch norm: channels are free; a split batch or image takes part in statistics of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from ..redistribute import CollectiveUse
from .factors import factor_options
from .registry import Call, Labels, LocalTypes, OpRule, Option, Saved, plain_label, register, same_call
from .schema import arguments, axes_of, handles, named_operands, runtime_call

SCHEMA: Mapping[str, Arg] = {
    "input": None, "weight": None, "bias": None, "running_mean": None, "running_var": None, "training": True,
    "momentum": 0.1, "eps": 1e-5, "cudnn_enabled": True,
}  # fmt: skip


def _is_frozen(node: Node) -> bool:
    """Normalises with the running statistics in training, too."""
    return arguments(node, SCHEMA)["training"] is False


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given = arguments(node, SCHEMA)
    dims = [f"d{i}" for i in range(len(node.output.shape))]
    names = {"input": dims, **{name: [dims[1]] for name in ("weight", "bias", "running_mean", "running_var")}}
    found = factor_options(named_operands(given, names, operands), [dims], operands, node.outputs)
    mixes = not _is_frozen(node)
    return tuple(replace(option, runs_collectives=mixes and option.label != "d1") for option in found)


def _mixed_axes(node: Node, labels: Labels) -> tuple[str, ...]:
    dims = (f"d{i}" for i in range(len(node.output.shape)) if i != 1)
    return () if _is_frozen(node) else axes_of(labels, *dims)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    axes = _mixed_axes(node, labels)
    if not axes:
        return same_call(node, labels, outputs, sizes)
    names = [name for name in SCHEMA if name != "cudnn_enabled"]
    return runtime_call("batch_norm_split", arguments(node, SCHEMA), names, handles(axes))


def _collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    if not _mixed_axes(node, {axis: label}) or plain_label(label) == "d1":
        return ()
    dtype = operands[0].dtype if operands[0].dtype == "float64" else "float32"
    statistics = 2 * operands[0].shape[1] * ITEM_BYTES[dtype]
    uses = [CollectiveUse(op="all_gather", axis=axis, num_bytes=size * statistics, phase="forward", dtype=dtype)]
    if any(value.requires_grad for value in operands):
        uses.append(CollectiveUse(op="all_reduce", axis=axis, num_bytes=statistics, phase="backward", dtype=dtype))
    return tuple(uses)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Statistics and normalisation each read the whole batch; so do the two passes of the backward."""
    x = operands[0]
    passes = 1 if _is_frozen(node) else 2
    forward = Pass(flops=5 * x.numel, bytes=(passes + 1) * x.num_bytes, kernels=1)
    wanted = any(value.requires_grad for value in operands)
    backward = Pass(flops=8 * x.numel, bytes=5 * x.num_bytes, kernels=1) if wanted else Pass()
    return Work(forward=forward, backward=backward, dtype=x.dtype)


def _saved(node: Node) -> Saved:
    given = arguments(node, SCHEMA)
    weight = (1,) if given["weight"] is not None else ()
    return Saved(operands=(0, *weight), extra_bytes=2 * 4 * node.output.shape[1])


register(
    OpRule(
        ops=("aten.batch_norm.default",),
        options=_options,
        work=_work,
        saved=_saved,
        collectives=_collectives,
        localise=_localise,
        mixes_samples=True,
    )
)
