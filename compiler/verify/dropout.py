"""Switches dropout off without touching a module: random numbers cannot agree between one process and many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# (module, function) -> (position, name) of its probability
_PROBABILITY: dict[tuple[Any, str], tuple[int, str]] = {
    **{(F, name): (1, "p") for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")},
    **{(torch, name): (1, "p") for name in ("dropout", "dropout_", "native_dropout", "feature_dropout")},
    (F, "feature_alpha_dropout"): (1, "p"),
    (torch, "alpha_dropout"): (1, "p"),
    (F, "scaled_dot_product_attention"): (4, "dropout_p"),
    **{(torch, name): (5, "dropout") for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
}


def _kept(module: Any, function_name: str, position: int, name: str) -> Callable[..., Any]:
    """The function with probability 0. While it runs it is what the module has: tensor subclasses know it by that."""
    function = getattr(module, function_name)

    def keeps_everything(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[name] = 0.0
        with patch.object(module, function_name, function):
            return function(*args, **kwargs)

    return keeps_everything


class _KeepEverything(TorchFunctionMode):
    """Catches functions that were imported by name. Backward passes run outside of function modes."""

    def __init__(self) -> None:
        super().__init__()
        self.replaced: dict[Any, Callable[..., Any]] = {
            getattr(module, function): _kept(module, function, position, name)
            for (module, function), (position, name) in _PROBABILITY.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.replaced.get(func) or func)(*args, **(kwargs or {}))


@contextmanager
def dropout_off() -> Iterator[None]:
    """While active every dropout keeps everything, in recomputations inside a backward too."""
    with ExitStack() as stack:
        stack.enter_context(_KeepEverything())
        for (module, function), (position, name) in _PROBABILITY.items():
            stack.enter_context(patch.object(module, function, _kept(module, function, position, name)))
        yield
