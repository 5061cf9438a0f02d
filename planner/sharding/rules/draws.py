"""Draws: any dim may be split. Seeded as dropout is: ranks that hold the same values draw alike, split ones differ.

In the canonical graph what a draw overwrites is made by `empty`; rows of a permutation are never split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...capture.graph import Node
from .arguments import with_argument
from .factories import written_work
from .factors import aligned, factor_options, numbered_dims, saves_nothing
from .registry import Call, Labels, LocalTypes, OpRule, Option, register, same_call
from .schema import seed_over

# Where each has its size.
SIZED: Mapping[str, int] = {
    "aten.rand.default": 0,
    "aten.randn.default": 0,
    "aten.randint.default": 1,
    "aten.randint.low": 2,
}
# Draws over what `empty` made, and draws whose parameters are tensors.
POINTWISE = (
    "aten.bernoulli.p", "aten.uniform.default", "aten.normal_functional.default", "aten.exponential.default",
    "aten.random.default", "aten.random.from", "aten.random.to", "aten.geometric.default", "aten.cauchy.default",
    "aten.log_normal.default", "aten.bernoulli.default", "aten.normal.Tensor_float", "aten.normal.float_Tensor",
    "aten.normal.Tensor_Tensor",
)  # fmt: skip


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    shape = node.output.shape
    return factor_options(aligned(operands, shape), [numbered_dims(shape)], operands, node.outputs)


def _none(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    return ()


def _seeded(call: Call, node: Node, labels: Labels) -> Call:
    drawn = (f"d{i}" for i in range(len(node.output.shape)))
    return replace(call, kwargs=(*call.kwargs, ("seed", seed_over(labels, *drawn))))


def _localise_sized(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    return _seeded(with_argument(node, SIZED[node.op], "size", outputs[0].shape), node, labels)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    return _seeded(same_call(node, labels, outputs, sizes), node, labels)


register(
    OpRule(
        ops=tuple(SIZED),
        options=_options,
        work=written_work,
        saved=saves_nothing,
        localise=_localise_sized,
        is_random=True,
    )
)
register(
    OpRule(ops=POINTWISE, options=_options, work=written_work, saved=saves_nothing, localise=_localise, is_random=True)
)
register(
    OpRule(
        ops=("aten.randperm.default",),
        options=_none,
        work=written_work,
        saved=saves_nothing,
        localise=_localise,
        is_random=True,
    )
)
