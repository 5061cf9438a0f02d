"""Losses over classes that an axis splits. The logits stay where they are; two numbers a sample travel."""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from .embedding import own_rows


class _CrossEntropy(torch.autograd.Function):
    """Each sample's loss as a sum over ranks. Classes are the last dim; `weight` is that of all classes.

    loss = total_weight * log(sum of exp(logits)) - target_weight * logits[target] - sum of class_weight * logits,
    where the last term and its share of total_weight are there for label smoothing.
    """

    @staticmethod
    def forward(ctx, logits, target, weight, ignore_index, label_smoothing, axis):
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        peak = x.amax(-1)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=axis.get_group())
        total = (x - peak[..., None]).exp().sum(-1)
        dist.all_reduce(total, group=axis.get_group())
        log_total = total.log() + peak

        local, is_ours = own_rows(target, x.size(-1), axis)
        is_counted = target != ignore_index
        target_weight = (1 - label_smoothing) * weight[target.where(is_counted, 0)] * is_counted
        total_weight = target_weight + label_smoothing * weight.mean() * is_counted
        target_weight = target_weight * is_ours
        class_weight = label_smoothing * weight.chunk(axis.size())[axis.get_local_rank()] / len(weight)

        loss = -target_weight * x.gather(-1, local[..., None])[..., 0]
        if label_smoothing:
            loss -= (x @ class_weight) * is_counted
        if axis.get_local_rank() == 0:
            loss += total_weight * log_total
        ctx.save_for_backward(logits, log_total, local, is_counted, target_weight, total_weight, class_weight)
        ctx.label_smoothing = label_smoothing
        return loss

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        logits, log_total, local, is_counted, target_weight, total_weight, class_weight = ctx.saved_tensors
        x = (logits - log_total[..., None]).exp() * (grad * total_weight)[..., None]
        x.scatter_add_(-1, local[..., None], -(grad * target_weight)[..., None])
        if ctx.label_smoothing:
            x -= (grad * is_counted)[..., None] * class_weight
        return x.to(logits.dtype), None, None, None, None, None


def cross_entropy_split(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    axis: DeviceMesh,
) -> torch.Tensor:
    """Cross entropy of logits whose classes are split; the sum over ranks is the loss.

    `weight` holds all classes. `reduction`: 0 none, 1 mean, 2 sum.
    """
    logits = logits.movedim(1, -1) if logits.dim() > 1 else logits
    if weight is None:
        kind = torch.promote_types(logits.dtype, torch.float32)
        weight = torch.ones(logits.size(-1) * axis.size(), dtype=kind, device=logits.device)
    loss = _CrossEntropy.apply(logits, target, weight, ignore_index, label_smoothing, axis)
    if reduction:
        loss = loss.sum()
    if reduction == 1:
        is_counted = target != ignore_index
        loss = loss / (weight[target.where(is_counted, 0)] * is_counted).sum()
    return loss.to(logits.dtype)


def nll_loss_split(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    axis: DeviceMesh,
) -> torch.Tensor:
    """Negative log-likelihood of split classes; the sum over ranks is the loss. No mean: `reduction` is 0 or 2.

    `weight` holds this rank's classes. Targets on other ranks are ignored here.
    """
    class_dim = 1 if log_probabilities.dim() > 1 else 0
    local, is_ours = own_rows(target, log_probabilities.size(class_dim), axis)
    local = local.where(is_ours & (target != ignore_index), -100)
    return F.nll_loss(log_probabilities, local, weight, ignore_index=-100, reduction="sum" if reduction else "none")
