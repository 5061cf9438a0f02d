"""Tensors made from nothing: never split; those made like another tensor follow its splits."""

from __future__ import annotations

from collections.abc import Mapping

from ....cost_models.work import Pass, Work
from ...capture.graph import Node
from .arguments import with_argument
from .factors import factor_options, free_work, numbered_dims, saves_nothing
from .registry import Call, Labels, LocalTypes, OpRule, Option, register


def _none(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    return ()


def _like(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    names = numbered_dims(node.output.shape)
    return factor_options([names], [names], operands, node.outputs)


def written_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    return Work(forward=Pass(bytes=outputs[0].num_bytes, kernels=1), dtype=outputs[0].dtype)


def _sized(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """new_zeros and its kin: the operand gives only dtype and device, every output dim is a factor.

    A dim that is as long in the operand is split there too: `x.new_zeros(x.size(0))` takes a split x as it is.
    """
    sizes = operands[0].shape
    names = numbered_dims(node.output.shape)
    alike = [
        name if size == wanted else "" for name, size, wanted in zip(names, sizes, node.output.shape, strict=False)
    ]
    return factor_options([[*alike, *[""] * (len(sizes) - len(alike))]], [names], operands, node.outputs)


def _any(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Memory that something else fills."""
    return factor_options([], [numbered_dims(node.output.shape)], operands, node.outputs)


def _localise_any(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    return with_argument(node, 0, "size", outputs[0].shape)


def _localise_sized(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    return with_argument(node, 1, "size", outputs[0].shape)


register(
    OpRule(
        ops=(
            "aten.arange.default", "aten.arange.start", "aten.arange.start_step", "aten.linspace.default",
            "aten.zeros.default", "aten.ones.default", "aten.full.default", "aten.eye.default", "aten.eye.m",
            "aten.scalar_tensor.default", "aten.tensor.default",
        ),
        options=_none,
        work=written_work,
        saved=saves_nothing,
    )
)  # fmt: skip
register(
    OpRule(
        ops=(
            "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default", "aten.empty_like.default",
        ),
        options=_like,
        work=written_work,
        saved=saves_nothing,
    )
)  # fmt: skip
register(
    OpRule(
        ops=(
            "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default", "aten.new_empty.default",
        ),
        options=_sized,
        work=written_work,
        saved=saves_nothing,
        localise=_localise_sized,
    )
)  # fmt: skip
register(
    OpRule(
        ops=("aten.empty.memory_format",),
        options=_any,
        work=free_work,
        saved=saves_nothing,
        localise=_localise_any,
    )
)
