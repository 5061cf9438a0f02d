"""Dropout: any dim may be split. Draws are seeded: ranks that hold the same values draw alike, split ones differ."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from .factors import factor_options, numbered_dims, partial_option
from .registry import Call, Labels, LocalTypes, OpRule, Option, Saved, register, same_call
from .schema import arguments, seed_over

SCHEMA: Mapping[str, Arg] = {"input": None, "p": 0.5, "train": True}
TARGETS = {
    "aten.dropout.default": "seeded_dropout",
    "aten.native_dropout.default": "seeded_native_dropout",
    "aten.feature_dropout.default": "seeded_feature_dropout",
}


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    names = numbered_dims(node.output.shape)
    found = factor_options([names], [names] * len(node.outputs), operands, node.outputs)
    # Linear in its operand, and every rank draws the same mask; a mask that is an output is no sum.
    return found if len(node.outputs) > 1 else (*found, partial_option(node, operands, (0,)))


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    given = arguments(node, SCHEMA)
    if given["train"] is False:
        return same_call(node, labels, outputs, sizes)
    # Whole channels are dropped by feature_dropout: parts of one channel draw alike.
    drawn = 2 if node.op.startswith("aten.feature") else len(node.output.shape)
    seed = seed_over(labels, *(f"d{i}" for i in range(drawn)))
    return Call(target=TARGETS[node.op], args=(given["input"], given["p"], given["train"], seed))


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """One kernel draws, masks and scales; the mask has a byte for each value."""
    x = operands[0]
    traffic = 2 * x.num_bytes + x.numel
    backward = Pass(flops=x.numel, bytes=traffic, kernels=1) if x.requires_grad else Pass()
    return Work(forward=Pass(flops=3 * x.numel, bytes=traffic, kernels=1), backward=backward, dtype=x.dtype)


def _saved(node: Node) -> Saved:
    return Saved(outputs=(1,)) if len(node.outputs) > 1 else Saved(extra_bytes=node.output.numel)


def _factors_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """Without a fused kernel the factors, in the dtype of the values; of whole channels one for each."""
    x = operands[0]
    if node.op.startswith("aten.native"):
        return _saved(node)
    kept = prod(x.shape[:2]) if node.op.startswith("aten.feature") else x.numel
    return Saved(extra_bytes=kept * ITEM_BYTES[x.dtype])


register(
    OpRule(
        ops=tuple(TARGETS),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"cpu": _factors_saved},
        localise=_localise,
        is_random=True,
    )
)
