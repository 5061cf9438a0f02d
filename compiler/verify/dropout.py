"""Switches dropout off without touching a module: random numbers cannot agree between one process and many."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

# function -> (position, name) of its probability
_PROBABILITY = {
    F.dropout: (1, "p"), F.dropout1d: (1, "p"), F.dropout2d: (1, "p"), F.dropout3d: (1, "p"), F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"), torch.dropout: (1, "p"), torch.dropout_: (1, "p"),
    torch.native_dropout: (1, "p"),
    torch.feature_dropout: (1, "p"), torch.alpha_dropout: (1, "p"), F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}  # fmt: skip


class dropout_off(TorchFunctionMode):
    """While active every dropout keeps everything: its probability is 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.backward:
            return self._run_backward(*args, **kwargs)
        if func in _PROBABILITY:
            position, name = _PROBABILITY[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif name in kwargs or name == "p":
                kwargs[name] = 0.0
        return func(*args, **kwargs)

    def _backward(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self._run_backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    def _run_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        """The backward with the mode on: a checkpointed block runs again in it, and a mode is off while it handles a
        call. Edges of the graph in place of tensors do not come back here."""
        with self:
            torch.autograd.backward(
                _edges(tensors), grad_tensors, retain_graph, create_graph, grad_variables, _edges(inputs)
            )


def _edges(values: Any) -> Any:
    if values is None or isinstance(values, GradientEdge):
        return values
    if isinstance(values, torch.Tensor):
        return get_gradient_edge(values)
    return tuple(_edges(value) for value in values)
