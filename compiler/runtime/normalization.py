"""Normalisation over dims that axes split: statistics of all ranks, one small collective each way per axis."""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh


def mean_and_variance(
    x: torch.Tensor, dims: tuple[int, ...], axes: tuple[DeviceMesh, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance over `dims` of all ranks' equal parts; gathered, since sums of squares would cancel."""
    variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    for axis in axes:
        ours = torch.stack((mean, variance))[None]
        every = ours.new_empty(axis.size(), *ours.shape[1:])
        dist.all_gather_single(every, ours, group=axis.get_group())
        mean, variance = every[:, 0].mean(0), every[:, 1].mean(0) + every[:, 0].var(0, correction=0)
    return mean, variance


def mean_over(x: torch.Tensor, axes: tuple[DeviceMesh, ...]) -> torch.Tensor:
    """The mean of all ranks' tensors."""
    x = x.contiguous()
    for axis in axes:
        dist.all_reduce(x, group=axis.get_group())
    return x / prod(axis.size() for axis in axes)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias; without a mean for RMS norm. Also returns the statistics."""

    @staticmethod
    def forward(ctx, x, weight, bias, dims, axes, eps, is_centred):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if is_centred:
            mean, variance = mean_and_variance(wide, dims, axes)
        else:
            variance = mean_over(wide.square().mean(dims, keepdim=True), axes)
            mean = torch.zeros_like(variance)
        scale = (variance + eps).rsqrt()
        y = (wide - mean) * scale
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.dims, ctx.axes, ctx.is_centred, ctx.bias_shape = (
            dims,
            axes,
            is_centred,
            None if bias is None else bias.shape,
        )
        ctx.mark_non_differentiable(mean, variance)
        return y.to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx, grad, *_):
        x, weight, mean, scale = ctx.saved_tensors
        wide = grad.to(scale.dtype)
        y = (x - mean) * scale
        grad_y = wide if weight is None else wide * weight
        terms = [(grad_y * y).mean(ctx.dims, keepdim=True)]
        if ctx.is_centred:
            terms.append(grad_y.mean(ctx.dims, keepdim=True))
        along_y, *offset = mean_over(torch.stack(terms), ctx.axes)
        grad_x = (grad_y - y * along_y - (offset[0] if offset else 0)) * scale
        grad_weight = None if weight is None else (wide * y).sum_to_size(weight.shape).to(weight.dtype)
        grad_bias = None if ctx.bias_shape is None else grad.sum_to_size(ctx.bias_shape)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None


def layer_norm_split(
    x: torch.Tensor,
    num_dims: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    axes: tuple[DeviceMesh, ...],
) -> torch.Tensor:
    """Layer norm over the last `num_dims` dims, split over `axes` like weight and bias."""
    dims = tuple(range(x.dim() - num_dims, x.dim()))
    return _Normalise.apply(x, weight, bias, dims, axes, eps, True)[0]


def rms_norm_split(
    x: torch.Tensor, num_dims: int, weight: torch.Tensor | None, eps: float | None, axes: tuple[DeviceMesh, ...]
) -> torch.Tensor:
    """RMS norm over the last `num_dims` dims, split over `axes` like the weight."""
    dims = tuple(range(x.dim() - num_dims, x.dim()))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _Normalise.apply(x, weight, None, dims, axes, eps, False)[0]


def group_norm_split(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    axes: tuple[DeviceMesh, ...],
) -> torch.Tensor:
    """Group norm with dims behind the channels split over `axes`."""
    grouped = x.unflatten(1, (num_groups, -1))
    shape = (*grouped.shape[1:3], *[1] * (x.dim() - 2))
    weight = None if weight is None else weight.reshape(shape)
    bias = None if bias is None else bias.reshape(shape)
    dims = tuple(range(2, grouped.dim()))
    return _Normalise.apply(grouped, weight, bias, dims, axes, eps, True)[0].flatten(1, 2)


def batch_norm_split(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    axes: tuple[DeviceMesh, ...],
) -> torch.Tensor:
    """Batch norm with samples or pixels split over `axes`: every rank keeps the statistics of the whole batch."""
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    shape = (-1, *[1] * (x.dim() - 2))
    weight = None if weight is None else weight.reshape(shape)
    bias = None if bias is None else bias.reshape(shape)
    y, mean, variance = _Normalise.apply(x, weight, bias, (0, *range(2, x.dim())), axes, eps, True)
    count = x.numel() // x.size(1) * prod(axis.size() for axis in axes)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.flatten().to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance.flatten() * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return y
