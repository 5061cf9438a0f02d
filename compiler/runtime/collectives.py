"""Changes of placement over one mesh axis, each with the gradient that belongs to it.

A comment such as `S -> R / [slice]` reads: the value goes from split to replicated, its gradient is sliced. `P` is a
sum over ranks that has not been taken. `axis` is a one-dimensional DeviceMesh.

`groups` is for a dim that holds several parts in a row (query, key and value; or the samples of a flattened batch):
every part is split over the axis by itself. It is counted on the tensor that the function is given.
"""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class _Change(torch.autograd.Function):
    """Runs one function forward and another one on the gradient."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, forward: Callable, backward: Callable) -> torch.Tensor:
        ctx.backward_function = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return ctx.backward_function(grad), None, None


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def own_gradient(x: torch.Tensor) -> torch.Tensor:
    """R -> R / [copy], for a parameter whose gradient may else be the same memory as another one's."""
    return _Change.apply(x, _same, torch.clone)


def _sum(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=axis.get_group())
    return x


def _parts(x: torch.Tensor, dim: int, groups: int, parts: int = 1) -> torch.Tensor:
    """Move the dim to the front, as (parts, length, groups): part i is what rank i holds of every group."""
    return x.unflatten(dim, (groups, parts, -1)).movedim((dim + 1, dim + 2, dim), (0, 1, 2)).contiguous()


def _joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Undo `_parts`."""
    return x.movedim((0, 1, 2), (dim + 1, dim + 2, dim)).flatten(dim, dim + 2).contiguous()


def _gather(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int) -> torch.Tensor:
    part = _parts(x, dim, groups)
    parts = part.new_empty(axis.size(), *part.shape[1:])
    dist.all_gather_single(parts, part, group=axis.get_group())
    return _joined(parts, dim)


def _scatter_sum(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int) -> torch.Tensor:
    parts = _parts(x, dim, groups, axis.size())
    part = torch.empty_like(parts[:1])
    dist.reduce_scatter_single(part, parts, group=axis.get_group())
    return _joined(part, dim)


def _slice(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int) -> torch.Tensor:
    parts = x.unflatten(dim, (groups, axis.size(), -1))
    return parts.select(dim + 1, axis.get_local_rank()).flatten(dim, dim + 1).contiguous()


def _pad(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int) -> torch.Tensor:
    part = x.unflatten(dim, (groups, -1))
    parts = part.new_zeros(*part.shape[: dim + 1], axis.size(), *part.shape[dim + 1 :])
    parts.select(dim + 1, axis.get_local_rank()).copy_(part)
    return parts.flatten(dim, dim + 2)


def _first_only(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    return x.view_as(x) if axis.get_local_rank() == 0 else torch.zeros_like(x)


def _exchange(x: torch.Tensor, dim: int, to_dim: int, axis: DeviceMesh, groups: int, to_groups: int) -> torch.Tensor:
    if dim == to_dim:
        return _regroup(x, dim, axis, groups, to_groups)
    sent = _parts(x, to_dim, to_groups, axis.size())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.get_group())
    # Slice i came from rank i: it holds our part of `to_dim` and rank i's part of `dim`.
    pieces = [_joined(piece[None], to_dim).unflatten(dim, (groups, -1)) for piece in received]
    return torch.cat(pieces, dim + 1).flatten(dim, dim + 1)


def _regroup(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int, to_groups: int) -> torch.Tensor:
    """Split the same dim by other groups: every rank sends the rows that now belong to another."""
    length, rank = x.size(dim) * axis.size(), axis.get_local_rank()
    owner = torch.arange(axis.size()).repeat_interleave(length // groups // axis.size()).repeat(groups)
    to_owner = torch.arange(axis.size()).repeat_interleave(length // to_groups // axis.size()).repeat(to_groups)
    send_to, receive_from = to_owner[owner == rank], owner[to_owner == rank]
    sent = x.movedim(dim, 0)[send_to.argsort(stable=True).to(x.device)].contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(
        received,
        sent,
        receive_from.bincount(minlength=axis.size()).tolist(),
        send_to.bincount(minlength=axis.size()).tolist(),
        group=axis.get_group(),
    )
    order = receive_from.argsort(stable=True).argsort().to(x.device)
    return received[order].movedim(0, dim).contiguous()


def all_reduce(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """P -> R / nothing."""
    return _Change.apply(x, lambda x: _sum(x, axis), _same)


def reduce_scatter(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """P -> S / all_gather."""
    return _Change.apply(
        x,
        lambda x: _scatter_sum(x, dim, axis, groups),
        lambda grad: _gather(grad, dim, axis, groups),
    )


def all_reduce_both(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """P -> R / all_reduce, where every rank goes on to see only a part."""
    return _Change.apply(x, lambda x: _sum(x, axis), lambda grad: _sum(grad, axis))


def reduce_gradient(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """R -> R / all_reduce."""
    return _Change.apply(x, _same, lambda grad: _sum(grad, axis))


def take_shard(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """R -> S / all_gather."""
    return _Change.apply(x, lambda x: _slice(x, dim, axis, groups), lambda grad: _gather(grad, dim, axis, groups))


def keep_on_first(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """R -> P / nothing: the first rank keeps the value, the others hold zero."""
    return _Change.apply(x, lambda x: _first_only(x, axis), _same)


def all_gather_replicated(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """S -> R / [slice], where every rank goes on to compute the same."""
    return _Change.apply(x, lambda x: _gather(x, dim, axis, groups), lambda grad: _slice(grad, dim, axis, groups))


def all_gather(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """S -> R / reduce_scatter, where every rank goes on to see only a part."""
    return _Change.apply(
        x,
        lambda x: _gather(x, dim, axis, groups),
        lambda grad: _scatter_sum(grad, dim, axis, groups),
    )


def zero_pad(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """S -> P / [slice]: zero where other ranks hold the value."""
    return _Change.apply(x, lambda x: _pad(x, dim, axis, groups), lambda grad: _slice(grad, dim, axis, groups))


def all_to_all(
    x: torch.Tensor, dim: int, to_dim: int, axis: DeviceMesh, groups: int = 1, to_groups: int = 1
) -> torch.Tensor:
    """S(dim) -> S(to_dim) / all_to_all back."""
    return _Change.apply(
        x,
        lambda x: _exchange(x, dim, to_dim, axis, groups, to_groups),
        lambda grad: _exchange(grad, to_dim, dim, axis, to_groups, groups),
    )


def slice_shard(x: torch.Tensor, dim: int, axis: DeviceMesh, groups: int = 1) -> torch.Tensor:
    """R -> S / [pad]: the sum of the ranks' gradients is the whole one."""
    return _Change.apply(x, lambda x: _slice(x, dim, axis, groups), lambda grad: _pad(grad, dim, axis, groups))


def keep_gradient_on_first(x: torch.Tensor, axis: DeviceMesh) -> torch.Tensor:
    """R -> R / [mask]: equal gradients count once in a later sum over ranks."""
    return _Change.apply(x, _same, lambda grad: _first_only(grad, axis))
