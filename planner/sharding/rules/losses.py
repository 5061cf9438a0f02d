"""Losses: every sample is free; sums become partial sums; the classes of a cross entropy may be split.

A mean over split values is a mean of the parts, divided by their number, which is exact where all values count. A mean
that leaves labels out is not split over samples: capture writes it as a sum and a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from ..placement import PARTIAL, SUMMED_GRADIENT, split
from ..redistribute import CollectiveUse
from .factors import aligned, factor_options, size_of
from .registry import AxisRef, Call, Labels, LocalTypes, OpRule, Option, Saved, register, same_call
from .schema import arguments, has_tensor, named_operands, one_axis_of, runtime_call

NONE, MEAN, SUM = 0, 1, 2

CROSS_ENTROPY: Mapping[str, Arg] = {
    "input": None, "target": None, "weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0,
}  # fmt: skip
NLL: Mapping[str, Arg] = {
    "input": None, "target": None, "weight": None, "reduction": MEAN, "ignore_index": -100,
}  # fmt: skip
PAIR: Mapping[str, Arg] = {"input": None, "target": None, "reduction": MEAN}
POINTWISE: Mapping[str, Mapping[str, Arg]] = {
    "aten.mse_loss.default": PAIR,
    "aten.l1_loss.default": PAIR,
    "aten.smooth_l1_loss.default": {**PAIR, "beta": 1.0},
    "aten.huber_loss.default": {**PAIR, "delta": 1.0},
    "aten.kl_div.default": {**PAIR, "log_target": False},
    "aten.binary_cross_entropy.default": {"input": None, "target": None, "weight": None, "reduction": MEAN},
    "aten.binary_cross_entropy_with_logits.default": {
        "input": None, "target": None, "weight": None, "pos_weight": None, "reduction": MEAN,
    },
}  # fmt: skip
NLL_OPS = ("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")


def _schema(node: Node) -> Mapping[str, Arg]:
    return NLL if node.op in NLL_OPS else CROSS_ENTROPY


def _has_class_numbers(operands: LocalTypes) -> bool:
    """The target holds class numbers, not probabilities."""
    return "float" not in operands[1].dtype


def _class_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given = arguments(node, _schema(node))
    logits, has_numbers = operands[0], _has_class_numbers(operands)
    class_dim = min(1, len(logits.shape) - 1)
    dims = ["" if i == class_dim else f"d{i}" for i in range(len(logits.shape))]
    samples = [name for name in dims if name]
    names = {"input": dims, "target": samples if has_numbers else dims}
    outputs = samples if given["reduction"] == NONE else []
    found: tuple[Option, ...] = ()
    if given["reduction"] != MEAN or not has_numbers:
        found = factor_options(named_operands(given, names, operands), [outputs], operands, node.outputs)
    if has_tensor(given["weight"]) and operands[2].requires_grad:
        return found
    is_nll = node.op in NLL_OPS
    if has_numbers and logits.shape[class_dim] > 1 and not (is_nll and given["reduction"] == MEAN):
        weight = [split(0) if is_nll else SUMMED_GRADIENT] * has_tensor(given["weight"])
        found += (
            Option(
                label="v",
                operands=(split(class_dim), SUMMED_GRADIENT, *weight),
                outputs=(PARTIAL,),
                extent=logits.shape[class_dim],
                runs_collectives=not is_nll,
                one_axis=True,
            ),
        )
    return found


def _divided(call: Call, node: Node, labels: Labels, sizes: Mapping[str, int], reduction: Arg) -> Call:
    """Divide a mean of parts by their number."""
    if reduction != MEAN:
        return call
    parts = 1
    for label in {label.partition(";")[0] for label in labels.values()}:
        parts *= size_of(label, labels, sizes) if label.startswith("d") else 1
    return replace(call, divide_by=parts)


def _class_localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    schema = _schema(node)
    given = arguments(node, schema)
    if axis := one_axis_of(labels, "v"):
        target = "nll_loss_split" if node.op in NLL_OPS else "cross_entropy_split"
        return runtime_call(target, given, list(schema), AxisRef(axis))
    return _divided(same_call(node, labels, outputs, sizes), node, labels, sizes, given["reduction"])


def _class_collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    """The maximum and the sum of exponentials of every sample."""
    if label != "v" or node.op in NLL_OPS:
        return ()
    dtype = "float64" if operands[0].dtype == "float64" else "float32"
    num_bytes = operands[1].numel * ITEM_BYTES[dtype]
    use = CollectiveUse(op="all_reduce", axis=axis, num_bytes=num_bytes, phase="forward", dtype=dtype)
    return (use, use)


def _cross_entropy_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Log-softmax, then a choice of one class a sample; backward the gradients of both."""
    x = operands[0]
    forward = Pass(flops=5 * x.numel, bytes=2 * x.num_bytes + operands[1].num_bytes, kernels=2, transcendentals=x.numel)
    backward = Pass()
    if x.requires_grad:
        backward = Pass(flops=5 * x.numel, bytes=4 * x.num_bytes, kernels=2, transcendentals=x.numel)
    return Work(forward=forward, backward=backward, dtype=x.dtype)


def _cross_entropy_saved(node: Node) -> Saved:
    # One device keeps log-probabilities in place of the logits, which are as large; split classes keep the logits.
    return Saved(operands=(0, 1))


def _cross_entropy_kept(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """Log-probabilities in place of the logits, the targets, and the weight that the sum is divided by."""
    given = arguments(node, CROSS_ENTROPY)
    x, target = operands[0], operands[1]
    extra = x.num_bytes + ITEM_BYTES[x.dtype] * _has_class_numbers(operands)
    if given["label_smoothing"]:
        extra += ITEM_BYTES["bool"] * target.numel + ITEM_BYTES["int64"] * (given["reduction"] == MEAN)
    return Saved(operands=tuple(range(1, len(operands))), extra_bytes=extra)


def _split_kept(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """The logits as they are; of every sample its label here, whether it counts, and three numbers; class weights."""
    x, target = operands[0], operands[1]
    number = ITEM_BYTES["float64" if x.dtype == "float64" else "float32"]
    classes = x.shape[min(1, len(x.shape) - 1)]
    mean = number * (arguments(node, CROSS_ENTROPY)["reduction"] == MEAN)
    extra = target.num_bytes + (ITEM_BYTES["bool"] + 3 * number) * target.numel + number * classes + mean
    return Saved(operands=(0,), extra_bytes=extra)


def _split_nll_kept(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """The labels are numbered anew."""
    return Saved(operands=(0, *range(2, len(operands))), extra_bytes=operands[1].num_bytes + ITEM_BYTES["float32"])


def _nll_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    x, target = operands[0], operands[1]
    backward = Pass(flops=target.numel, bytes=x.num_bytes + target.num_bytes, kernels=1) if x.requires_grad else Pass()
    forward = Pass(flops=target.numel, bytes=2 * target.num_bytes, kernels=1)
    return Work(forward=forward, backward=backward, dtype=x.dtype)


def _nll_saved(node: Node) -> Saved:
    return Saved(operands=tuple(range(len(node.operands))), extra_bytes=ITEM_BYTES["float32"])


def _pointwise_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    shape = operands[0].shape
    if operands[1].shape != shape:
        return ()
    reduction = arguments(node, POINTWISE[node.op])["reduction"]
    outputs = aligned(node.outputs, shape) if reduction == NONE else [[]]
    return factor_options(aligned(operands, shape), outputs, operands, node.outputs)


def _pointwise_localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    reduction = arguments(node, POINTWISE[node.op])["reduction"]
    return _divided(same_call(node, labels, outputs, sizes), node, labels, sizes, reduction)


def _pointwise_loss_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """One kernel for the values, one for their sum; backward one."""
    read = sum(t.num_bytes for t in operands)
    wanted = sum(t.num_bytes for t in operands if t.requires_grad)
    x = operands[0]
    kernels = 1 if outputs[0].shape else 2
    forward = Pass(flops=3 * x.numel, bytes=read + (2 * kernels - 1) * x.num_bytes, kernels=kernels)
    backward = Pass(flops=3 * x.numel, bytes=read + wanted, kernels=1) if wanted else Pass()
    return Work(forward=forward, backward=backward, dtype=x.dtype)


register(
    OpRule(
        ops=("aten.cross_entropy_loss.default",),
        options=_class_options,
        work=_cross_entropy_work,
        saved=_cross_entropy_saved,
        saved_by={"cpu": _cross_entropy_kept, "cuda": _cross_entropy_kept, "cross_entropy_split": _split_kept},
        collectives=_class_collectives,
        localise=_class_localise,
    )
)
register(
    OpRule(
        ops=NLL_OPS,
        options=_class_options,
        work=_nll_work,
        saved=_nll_saved,
        saved_by={"nll_loss_split": _split_nll_kept},
        localise=_class_localise,
    )
)
register(
    OpRule(ops=tuple(POINTWISE), options=_pointwise_options, work=_pointwise_loss_work, localise=_pointwise_localise)
)
