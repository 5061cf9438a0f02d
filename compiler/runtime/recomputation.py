"""Activation checkpointing for schedules that split the backward: a block runs again once, for both parts of it.

`torch.utils.checkpoint` runs a block again for every call of the autograd engine, and of those the second part of a
backward makes one for each weight.
"""

# autograd.Function asks for overrides of another signature.
# pyright: reportIncompatibleMethodOverride=false

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn


class _Inputs(torch.autograd.Function):
    """Keeps tensors as long as its node, and where hooks for saved tensors see them."""

    @staticmethod
    def forward(ctx, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.view_as(leaf)


class _Saved:
    """Stands for what autograd saves of a block; has the tensor from when the block has run again."""

    tensor: torch.Tensor


class _AllSaved(Exception):
    """Ends the second run of a block: what comes behind is not needed."""


def recomputed_once(
    block: nn.Module, *inputs, context_fn: Callable = lambda: (nullcontext(), nullcontext())
) -> torch.Tensor:
    """Run a block so that the backward computes it again, once, when it first needs a tensor that autograd would save.

    Each such tensor then stays until the backward is through with it, however many calls of the autograd engine that
    takes. `context_fn` makes the contexts of the first and of the second run.
    """
    positions = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor)]
    others = [x for x in inputs if not isinstance(x, torch.Tensor)]
    node = _Inputs.apply(torch.empty(0, requires_grad=True), *(inputs[i] for i in positions)).grad_fn
    device = inputs[positions[0]].device.type
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
    first, again = context_fn()
    places: list[weakref.ref[_Saved]] = []

    def pack(tensor: torch.Tensor) -> _Saved:
        saved = _Saved()
        places.append(weakref.ref(saved))
        return saved

    def unpack(saved: _Saved) -> torch.Tensor:
        if not hasattr(saved, "tensor"):
            run_again()
        return saved.tensor

    def run_again() -> None:
        nonlocal node, again
        waiting = places.copy()

        def fill(tensor: torch.Tensor) -> None:
            saved = waiting.pop(0)()
            if saved is not None:
                saved.tensor = tensor.detach()
            if not waiting:
                raise _AllSaved

        given = others.copy()
        for i, x in zip(positions, node.saved_tensors, strict=True):
            given.insert(i, x.detach().requires_grad_(x.requires_grad))
        hooks = torch.autograd.graph.saved_tensors_hooks(fill, lambda saved: saved)
        try:
            with torch.enable_grad(), hooks, autocast, again:
                block(*given)
        except _AllSaved:
            pass
        node = again = None  # frees the inputs, and what the contexts have kept for nothing

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack), first:
        return block(*inputs)
