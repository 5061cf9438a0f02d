"""Softmax over a dim that axes split. Only maxima and sums travel."""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def over_axes(x: torch.Tensor, op: str, axes: tuple[DeviceMesh, ...]) -> torch.Tensor:
    """Reduce over several axes, without a gradient."""
    x = x.clone(memory_format=torch.contiguous_format)
    for axis in axes:
        dist.all_reduce(x, op=getattr(dist.ReduceOp, op), group=axis.get_group())
    return x


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, dim: int, axes: tuple[DeviceMesh, ...], is_log: bool) -> torch.Tensor:
        shifted = x - over_axes(x.amax(dim, keepdim=True), "MAX", axes)
        exp = shifted.exp()
        total = over_axes(exp.sum(dim, keepdim=True), "SUM", axes)
        y = shifted - total.log() if is_log else exp / total
        ctx.save_for_backward(y)
        ctx.dim, ctx.axes, ctx.is_log = dim, axes, is_log
        return y

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        (y,) = ctx.saved_tensors
        if ctx.is_log:
            total = over_axes(grad.sum(ctx.dim, keepdim=True), "SUM", ctx.axes)
            return grad - y.exp() * total, None, None, None
        total = over_axes((grad * y).sum(ctx.dim, keepdim=True), "SUM", ctx.axes)
        return y * (grad - total), None, None, None


def softmax_split(
    x: torch.Tensor, dim: int, axes: tuple[DeviceMesh, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Softmax over a split dim: all_reduce of the maxima and of the sums, one all_reduce backward."""
    return _Softmax.apply(x.to(dtype or x.dtype), dim, axes, False)


def log_softmax_split(
    x: torch.Tensor, dim: int, axes: tuple[DeviceMesh, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Log-softmax over a split dim: all_reduce of the maxima and of the sums, one all_reduce backward."""
    return _Softmax.apply(x.to(dtype or x.dtype), dim, axes, True)
