"""Pooling: leading dims are free; rows and columns need a halo, or none where windows do not overlap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from ..placement import PARTIAL, split
from ..redistribute import CollectiveUse
from .factors import factor_options, run_option, size_of
from .registry import Call, Labels, LocalTypes, OpRule, Option, Saved, register, same_call
from .schema import arguments, expanded
from .windows import Windows, extended_bytes, halo_axes, halo_collectives, spatial_options

MAX_SCHEMA: Mapping[str, Arg] = {
    "input": None, "kernel": 1, "stride": (), "padding": 0, "dilation": 1, "ceil_mode": False,
}  # fmt: skip
AVERAGE_SCHEMA: Mapping[str, Arg] = {
    "input": None, "kernel": 1, "stride": (), "padding": 0, "ceil_mode": False, "count_include_pad": True,
    "divisor_override": None,
}  # fmt: skip
NUM_DIMS = {f"aten.{kind}_pool{n}d.default": n for kind in ("max", "avg") for n in (1, 2, 3)}
WITH_INDICES = {f"aten.max_pool{n}d_with_indices.default": n for n in (2, 3)}
ADAPTIVE = {f"aten.adaptive_avg_pool{n}d.default": n for n in (1, 2, 3)}


def _is_average(node: Node) -> bool:
    return node.op.startswith("aten.avg")


def _given(node: Node) -> dict[str, Arg]:
    return arguments(node, AVERAGE_SCHEMA if _is_average(node) else MAX_SCHEMA)


def _windows(node: Node) -> Windows:
    given, count = _given(node), NUM_DIMS[node.op]
    kernel = expanded(given["kernel"], count)
    return Windows(
        kernel=kernel,
        stride=expanded(given["stride"], count) if given["stride"] else kernel,
        padding=expanded(given["padding"], count),
        dilation=expanded(given.get("dilation", 1), count),
    )


def _leading_options(node: Node, operands: LocalTypes, num_dims: int) -> tuple[Option, ...]:
    leading = len(node.output.shape) - num_dims
    names = [*(f"d{i}" for i in range(leading)), *[""] * num_dims]
    return factor_options([names], [names] * len(node.outputs), operands, node.outputs)


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given, windows = _given(node), _windows(node)
    found = _leading_options(node, operands, NUM_DIMS[node.op])
    # An average that leaves the padding out divides by less at the border.
    uneven = not given.get("count_include_pad", True) and any(windows.padding)
    if given["ceil_mode"] or uneven or given.get("divisor_override") is not None:
        return found
    return (*found, *spatial_options(windows, operands, node.output))


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    axes = halo_axes(NUM_DIMS[node.op], labels)
    if not any(axes):
        return same_call(node, labels, outputs, sizes)
    windows, x = _windows(node), _given(node)["input"]
    shape = (windows.kernel, windows.stride, windows.padding)
    if _is_average(node):
        return Call(target="avg_pool_halo", args=(x, *shape, axes))
    return Call(target="max_pool_halo", args=(x, *shape, windows.dilation, axes))


def _collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    return halo_collectives(_windows(node), node, label, axis, operands, outputs)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    given = _given(node)
    count = {**NUM_DIMS, **WITH_INDICES}[node.op]
    flops = outputs[0].numel * prod(expanded(given["kernel"], count))
    return _reduction_work(flops, operands, outputs)


def _reduction_work(flops: int, operands: LocalTypes, outputs: LocalTypes) -> Work:
    x, out = operands[0], outputs[0]
    traffic = x.num_bytes + out.num_bytes
    backward = Pass(flops=flops, bytes=traffic + x.num_bytes, kernels=1) if x.requires_grad else Pass()
    return Work(forward=Pass(flops=flops, bytes=traffic, kernels=1), backward=backward, dtype=out.dtype)


def _saved(node: Node) -> Saved:
    if node.op in WITH_INDICES:
        return Saved(operands=(0,), outputs=(1,))
    if _is_average(node) or node.op == "aten.max_pool1d.default":
        return Saved(operands=(0,))
    return Saved(operands=(0,), extra_bytes=8 * node.output.numel)  # indices, int64


def _halo_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """The image with the rows of its neighbours."""
    indices = 0 if _is_average(node) else ITEM_BYTES["int64"] * node.output.numel
    return Saved(extra_bytes=extended_bytes(_windows(node), operands[0], call.args[-1]) + indices)


def _adaptive_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """A spatial dim whose outputs see equal runs: to one output it is contracted, else inputs and outputs are split."""
    count = ADAPTIVE[node.op]
    found = list(_leading_options(node, operands, count))
    for dim in range(count):
        position = len(node.output.shape) - count + dim
        size, outs = operands[0].shape[position], node.output.shape[position]
        pair = split(position)
        if outs == 1 and size > 1:
            found.append(run_option(f"s{dim}", size, [pair], [PARTIAL]))
        elif outs > 1 and size % outs == 0:
            found.append(run_option(f"s{dim}", outs, [pair], [pair]))
    return tuple(found)


def _adaptive_localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    count = ADAPTIVE[node.op]
    call = same_call(node, labels, outputs, sizes)
    contracted = (dim for dim in range(count) if node.output.shape[dim - count] == 1)
    divide_by = prod(size_of(f"s{dim}", labels, sizes) for dim in contracted)
    return replace(call, args=(call.args[0], outputs[0].shape[-count:]), kwargs=(), divide_by=divide_by)


def _adaptive_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    return _reduction_work(operands[0].numel, operands, outputs)


def _adaptive_saved(node: Node) -> Saved:
    """To one output it is a mean, which keeps nothing."""
    is_mean = all(size == 1 for size in node.output.shape[-ADAPTIVE[node.op] :])
    return Saved() if is_mean else Saved(operands=(0,))


def _indices_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Indices count within an image, which therefore stays whole."""
    return _leading_options(node, operands, WITH_INDICES[node.op])


register(
    OpRule(
        ops=tuple(NUM_DIMS),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"max_pool_halo": _halo_saved, "avg_pool_halo": _halo_saved},
        collectives=_collectives,
        localise=_localise,
    )
)
register(OpRule(ops=tuple(WITH_INDICES), options=_indices_options, work=_work, saved=_saved))
register(
    OpRule(
        ops=tuple(ADAPTIVE),
        options=_adaptive_options,
        work=_adaptive_work,
        saved=_adaptive_saved,
        localise=_adaptive_localise,
    )
)
