"""Convolution and pooling of images whose rows or columns are split: the borders come from the neighbours."""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh


def swap_with_neighbours(
    to_previous: torch.Tensor, to_next: torch.Tensor, axis: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Send to both neighbours of a ring and return what came from the previous and from the next one.

    It is a ring so that every rank does the same; what passes between the first and the last rank is not used.
    """
    from_previous, from_next = torch.empty_like(to_next), torch.empty_like(to_previous)
    previous, following = (axis.get_local_rank() - 1) % axis.size(), (axis.get_local_rank() + 1) % axis.size()
    transfers = [
        dist.P2POp(operation, tensor, group=axis.get_group(), group_peer=peer)
        for operation, tensor, peer in (
            (dist.isend, to_next.contiguous(), following),
            (dist.isend, to_previous.contiguous(), previous),
            (dist.irecv, from_previous, previous),
            (dist.irecv, from_next, following),
        )
        if tensor.numel()
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return from_previous, from_next


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, before, after, axis, fill):
        ctx.dim, ctx.before, ctx.after, ctx.axis = dim, before, after, axis
        last = x.narrow(dim, x.size(dim) - before, before)
        from_previous, from_next = swap_with_neighbours(x.narrow(dim, 0, after), last, axis)
        if axis.get_local_rank() == 0:
            from_previous.fill_(fill)
        if axis.get_local_rank() == axis.size() - 1:
            from_next.fill_(fill)
        return torch.cat((from_previous, x, from_next), dim)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        dim, before, after, axis = ctx.dim, ctx.before, ctx.after, ctx.axis
        size = grad.size(dim) - before - after
        to_previous, own, to_next = grad.split((before, size, after), dim)
        from_previous, from_next = swap_with_neighbours(to_previous, to_next, axis)
        own = own.clone()
        if axis.get_local_rank() > 0:
            own.narrow(dim, 0, after).add_(from_previous)
        if axis.get_local_rank() < axis.size() - 1:
            own.narrow(dim, size - before, before).add_(from_next)
        return own, None, None, None, None, None


def halo_exchange(
    x: torch.Tensor, dim: int, before: int, after: int, axis: DeviceMesh, fill: float = 0.0
) -> torch.Tensor:
    """Extend a split dim by `before` positions of the previous rank and `after` of the next; `fill` at the ends."""
    return _Halo.apply(x, dim, before, after, axis, fill)


def with_halos(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    axes: tuple[DeviceMesh | None, ...],
    fill: float = 0.0,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Replace the padding of split dims by what the windows see of the neighbours; `axes` names the axis of each dim.

    A rank's windows start `padding` before its part and end `dilation * (kernel - 1) - padding - stride + 1` behind it.
    """
    left = list(padding)
    for i, axis in enumerate(axes):
        if axis is not None:
            after = dilation[i] * (kernel[i] - 1) - padding[i] - stride[i] + 1
            x = halo_exchange(x, x.dim() - len(axes) + i, padding[i], max(after, 0), axis, fill)
            left[i] = 0
    return x, tuple(left)


def convolution_halo(
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    axes: tuple[DeviceMesh | None, ...],
) -> torch.Tensor:
    """Convolution with the spatial dims split over `axes` (None: whole)."""
    x, padding = with_halos(x, weight.shape[2:], stride, padding, dilation, axes)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(axes) - 1]
    return convolution(x, weight, None, stride, padding, dilation, groups)


def max_pool_halo(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    axes: tuple[DeviceMesh | None, ...],
) -> torch.Tensor:
    """Max pooling with the spatial dims split over `axes` (None: whole)."""
    x, padding = with_halos(x, kernel, stride, padding, dilation, axes, fill=float("-inf"))
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(axes) - 1]
    return pool(x, kernel, stride, padding, dilation)


def avg_pool_halo(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    axes: tuple[DeviceMesh | None, ...],
) -> torch.Tensor:
    """Average pooling, padding counted, with the spatial dims split over `axes` (None: whole)."""
    x, padding = with_halos(x, kernel, stride, padding, (1,) * len(kernel), axes)
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(axes) - 1]
    return pool(x, kernel, stride, padding)
