"""Elementwise operations, by torch's pointwise tag: every dim of the output may be split, operands broadcast.

Linear ones pass partial sums: jointly in all operands (add), in one of two factors (mul), or in the first (div).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ....cost_models.work import Pass, Work
from ...capture.graph import Node, Ref
from .factors import aligned, factor_options, is_summable, partial_option, saves_nothing, saves_output
from .registry import LocalTypes, OpRule, Option, Saved, pointwise_work, register, register_fallback, saves_operands

# Linear in all their tensors together.
JOINTLY_LINEAR = (
    "aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.neg.default", "aten.positive.default",
    "aten.clone.default", "aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device",
    "aten.mul.Scalar", "aten.div.Scalar", "aten.where.self", "aten.detach.default", "aten.alias.default",
    "aten.contiguous.default",
)  # fmt: skip
# Linear in their tensor if the scalar that fills in is zero: op -> position of the scalar.
ZERO_FILLING = {"aten.masked_fill.Scalar": 2, "aten.where.ScalarOther": 2, "aten.where.ScalarSelf": 1}
CONDITIONS = {
    "aten.where.self": 0,
    "aten.where.ScalarOther": 0,
    "aten.where.ScalarSelf": 0,
    "aten.masked_fill.Scalar": 1,
}
UNTAGGED = (
    "aten._to_copy.default", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as.default",
    "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar", "aten.masked_fill.Tensor",
    "aten.hardswish.default", "aten.log_sigmoid.default", "aten.floor_divide.default", "aten.floor_divide.Scalar",
    "aten.__and__.Tensor", "aten.__or__.Tensor", "aten.__and__.Scalar", "aten.__or__.Scalar", "aten.rsub.Tensor",
    "aten.detach.default", "aten.alias.default", "aten.contiguous.default", "aten.float_power.Tensor_Scalar",
    "aten.softplus.default",
)  # fmt: skip

KEEPS_OUTPUT = frozenset(
    f"aten.{name}.default"
    for name in ("relu", "sigmoid", "tanh", "exp", "exp2", "sqrt", "rsqrt", "reciprocal", "expm1", "tan")
)
KEEPS_NOTHING = frozenset(
    ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.rsub.Tensor", "aten.rsub.Scalar")
    + ("aten.neg.default", "aten.positive.default", "aten.clone.default", "aten._to_copy.default", "aten.to.dtype")
    + ("aten.to.dtype_layout", "aten.to.device", "aten.mul.Scalar", "aten.div.Scalar", "aten.detach.default")
    + ("aten.alias.default", "aten.contiguous.default", "aten.type_as.default", "aten.fmod.Scalar")
    + ("aten.remainder.Scalar", "aten.floor.default", "aten.ceil.default", "aten.round.default", "aten.trunc.default")
    + ("aten.sign.default",)
)
KEEPS_CONDITION = frozenset(("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"))

# Exponentials, logarithms and the like per element, forward and backward, where a kernel computes any.
TRANSCENDENTALS = {
    "gelu": (1, 2), "silu": (1, 1), "sigmoid": (1, 0), "tanh": (1, 0), "exp": (1, 0), "exp2": (1, 0), "expm1": (1, 0),
    "log": (1, 0), "log2": (1, 0), "log10": (1, 0), "log1p": (1, 0), "erf": (1, 1), "sin": (1, 1), "cos": (1, 1),
    "tan": (1, 0), "pow": (1, 1), "float_power": (1, 1), "softplus": (2, 1), "log_sigmoid": (2, 1), "mish": (2, 2),
    "elu": (1, 0), "celu": (1, 1), "selu": (1, 0), "logit": (1, 0), "xlogy": (1, 1),
}  # fmt: skip


def pointwise_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """Every dim of the output, and "partial" where the operation is linear."""
    shape = node.output.shape
    if any(value.shape != shape for value in node.outputs) or any(len(v.shape) > len(shape) for v in operands):
        return ()
    outputs = aligned(node.outputs, shape)
    found = factor_options(aligned(operands, shape), outputs, operands, node.outputs)
    return (*found, *_partial_options(node, operands))


def _partial_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    if not is_summable(node.outputs):
        return ()
    condition = CONDITIONS.get(node.op)
    values = [i for i in range(len(operands)) if i != condition]
    if not is_summable([operands[i] for i in values]):
        return ()
    is_whole = "int" in node.output.dtype
    if is_whole and any("float" in operands[i].dtype for i in values):
        return ()
    if node.op in ("aten.mul.Tensor", "aten.div.Tensor"):
        if len(operands) == 1:
            return (partial_option(node, operands, (0,)),) if isinstance(node.args[0], Ref) else ()
        positions = (0, 1) if node.op == "aten.mul.Tensor" else (0,)
        return tuple(partial_option(node, operands, (i,), f"partial:{i}") for i in positions)
    if node.op in ZERO_FILLING:
        position = ZERO_FILLING[node.op]
        scalar = node.args[position] if len(node.args) > position else None
        return (partial_option(node, operands, values),) if scalar == 0 else ()
    if node.op in JOINTLY_LINEAR:
        # A literal operand (x + 1) is added on every rank: not linear.
        literals = node.op in ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor") and len(operands) < 2
        return () if literals else (partial_option(node, operands, values),)
    return ()


def _linear_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Additions: the gradient passes as it is, or is summed over the dims that were broadcast."""
    forward = pointwise_work(node, operands, outputs).forward
    backward = Pass()
    for value in operands:
        if value.requires_grad and value.numel < outputs[0].numel:
            traffic = outputs[0].num_bytes + value.num_bytes
            backward += Pass(flops=outputs[0].numel, bytes=traffic, kernels=1)
    return Work(forward=forward, backward=backward, dtype=outputs[0].dtype)


def _product_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Products: for each operand with a gradient, one kernel reads the output gradient and the other operands."""
    forward = pointwise_work(node, operands, outputs).forward
    backward = Pass()
    read = sum(t.num_bytes for t in operands)
    for value in operands:
        if value.requires_grad:
            traffic = outputs[0].num_bytes + read - value.num_bytes + max(value.num_bytes, outputs[0].num_bytes)
            backward += Pass(flops=outputs[0].numel, bytes=traffic, kernels=1)
            if value.numel < outputs[0].numel:
                traffic = outputs[0].num_bytes + value.num_bytes
                backward += Pass(flops=outputs[0].numel, bytes=traffic, kernels=1)
    return Work(forward=forward, backward=backward, dtype=outputs[0].dtype)


def _free(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    return Work(dtype=outputs[0].dtype)


def _transcendental_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    work = pointwise_work(node, operands, outputs)
    ahead, back = TRANSCENDENTALS[node.op.split(".")[1]]
    numel = outputs[0].numel
    return replace(
        work,
        forward=replace(work.forward, transcendentals=ahead * numel),
        backward=replace(work.backward, transcendentals=back * numel) if work.backward.kernels else work.backward,
    )


def _saves_condition(node: Node) -> Saved:
    return Saved(operands=(1,))


def _saves_product(node: Node) -> Saved:
    """Each factor for the gradient of the other; a product with a literal keeps nothing."""
    if len(node.operands) < 2:
        return Saved()
    if node.op == "aten.mul.Tensor":
        return Saved(operands=(0, 1), wanted_by=((0, 1), (1, 0)))
    return Saved(operands=(0, 1), wanted_by=((0, 1), (1, 0), (1, 1)))


def _rule(op: str) -> OpRule:
    work, saved = pointwise_work, saves_operands
    if op in ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.add.Scalar", "aten.sub.Scalar"):
        work = _linear_work
    elif op in ("aten.mul.Tensor", "aten.div.Tensor", "aten.mul.Scalar", "aten.div.Scalar"):
        work = _product_work
    elif op in ("aten.detach.default", "aten.alias.default"):
        work = _free
    elif op.split(".")[1] in TRANSCENDENTALS:
        work = _transcendental_work
    if op in KEEPS_OUTPUT:
        saved = saves_output
    elif op in KEEPS_NOTHING:
        saved = saves_nothing
    elif op in KEEPS_CONDITION:
        saved = _saves_condition
    elif op in ("aten.mul.Tensor", "aten.div.Tensor"):
        saved = _saves_product
    elif op in CONDITIONS:
        saved = _saves_where
    return OpRule(ops=(op,), options=pointwise_options, work=work, saved=saved)


def _saves_where(node: Node) -> Saved:
    return Saved(operands=(0,))


def _by_tag(op: str) -> OpRule | None:
    """A rule for an aten operation that torch tags as pointwise, pure and not random."""
    parts = op.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return None
    overload = getattr(getattr(torch.ops.aten, parts[1], None), parts[2], None)
    if overload is None or torch.Tag.pointwise not in overload.tags:
        return None
    if torch.Tag.nondeterministic_seeded in overload.tags or overload._schema.is_mutable:
        return None
    return _rule(op)


def _prelu_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    """The weight is one number, or one for each channel, which is dim 1."""
    value, weight = operands
    names = [f"d{i}" for i in range(len(value.shape))]
    own = ["d1"] if weight.shape and weight.shape[0] > 1 else [""] * len(weight.shape)
    return factor_options([names, own], [names], operands, node.outputs)


register(OpRule(ops=("aten.prelu.default",), options=_prelu_options))
for _op in UNTAGGED:
    register(_rule(_op))
register_fallback(_by_tag)
