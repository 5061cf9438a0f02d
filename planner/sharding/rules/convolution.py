"""Convolutions: samples, output channels, contracted input channels, channel groups, rows and columns with a halo."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ....cost_models.work import Gemm, Pass, Work
from ...capture.graph import Arg, Node
from ..placement import split
from ..redistribute import CollectiveUse
from .factors import factor_options, run_option, size_of
from .registry import Call, Labels, LocalTypes, OpRule, Option, Saved, register, same_call
from .schema import arguments, expanded, has_tensor, named_operands
from .windows import Windows, extended_bytes, halo_axes, halo_collectives, spatial_options

SCHEMA: Mapping[str, Arg] = {
    "input": None, "weight": None, "bias": None, "stride": (1,), "padding": (0,), "dilation": (1,),
    "groups": 1,
}  # fmt: skip
NUM_DIMS = {f"aten.conv{n}d.{overload}": n for n in (1, 2, 3) for overload in ("default", "padding")}


def _windows(node: Node, operands: LocalTypes) -> Windows:
    given, count = arguments(node, SCHEMA), NUM_DIMS[node.op]
    stride, padding, dilation = (expanded(given[name], count) for name in ("stride", "padding", "dilation"))
    return Windows(kernel=operands[1].shape[2:], stride=stride, padding=padding, dilation=dilation)


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given, count = arguments(node, SCHEMA), NUM_DIMS[node.op]
    if len(operands[0].shape) != count + 2:
        return ()
    has_bias, has_groups = has_tensor(given["bias"]), given["groups"] != 1
    whole = [""] * count
    # A bias is added to every rank's part, so input channels, whose results are added up, cannot be split with one.
    inputs = "" if has_bias or has_groups else "i"
    outputs = "" if has_groups else "o"
    names = {"input": ["n", inputs, *whole], "weight": [outputs, inputs, *whole], "bias": [outputs]}
    found = factor_options(named_operands(given, names, operands), [["n", outputs, *whole]], operands, node.outputs)
    if has_groups:
        places = [split(1), split(0), *[split(0)] * has_bias]
        found += (run_option("g", int(given["groups"]), places, [split(1)]),)  # type: ignore[call-overload]
    if has_bias or isinstance(given["padding"], str):
        return found
    return (*found, *spatial_options(_windows(node, operands), operands, node.output))


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    given, count = arguments(node, SCHEMA), NUM_DIMS[node.op]
    groups = int(given["groups"]) // size_of("g", labels, sizes)  # type: ignore[call-overload]
    axes = halo_axes(count, labels)
    if not any(axes):
        local = Call(target=node.op, args=tuple({**given, "groups": groups}.values()))
        return same_call(node, labels, outputs, sizes) if groups == given["groups"] else local
    stride, padding, dilation = (expanded(given[name], count) for name in ("stride", "padding", "dilation"))
    args = (given["input"], given["weight"], stride, padding, dilation, groups, axes)
    return Call(target="convolution_halo", args=args)


def _collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    if not label.startswith("h"):
        return ()
    return halo_collectives(_windows(node, operands), node, label, axis, operands, outputs)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """An implicit matrix product forward, one for each gradient backward; each touches input, weight and output."""
    x, weight, out = operands[0], operands[1], outputs[0]
    groups = x.shape[1] // weight.shape[1] if len(x.shape) > 2 else 1
    m, n, k = out.numel // weight.shape[0], weight.shape[0] // groups, prod(weight.shape[1:])
    traffic = x.num_bytes + weight.num_bytes + out.num_bytes
    backward = Pass()
    if x.requires_grad:
        backward += Pass(gemms=(Gemm(m, k, n, groups),), bytes=traffic, kernels=1)
    if weight.requires_grad:
        backward += Pass(gemms=(Gemm(k, n, m, groups),), bytes=traffic, kernels=1)
    forward = Pass(gemms=(Gemm(m, n, k, groups),), bytes=traffic, kernels=1)
    return Work(forward=forward, backward=backward, dtype=out.dtype)


def _saved(node: Node) -> Saved:
    return Saved(operands=(0, 1))


def _halo_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """The image with the rows of its neighbours."""
    return Saved(operands=(1,), extra_bytes=extended_bytes(_windows(node, operands), operands[0], call.args[-1]))


register(
    OpRule(
        ops=tuple(NUM_DIMS),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"convolution_halo": _halo_saved},
        collectives=_collectives,
        localise=_localise,
        kernels=("aten.convolution.default",),
    )
)
