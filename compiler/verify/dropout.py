"""Switches dropout off without touching a module: random numbers cannot agree between one process and many."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# function -> (position, name) of its probability
_PROBABILITY = {
    F.dropout: (1, "p"), F.dropout1d: (1, "p"), F.dropout2d: (1, "p"), F.dropout3d: (1, "p"), F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"), torch.dropout: (1, "p"), torch.dropout_: (1, "p"),
    torch.native_dropout: (1, "p"),
    torch.feature_dropout: (1, "p"), torch.alpha_dropout: (1, "p"), F.scaled_dot_product_attention: (4, "dropout_p"),
}  # fmt: skip


class dropout_off(TorchFunctionMode):
    """While active every dropout keeps everything: its probability is 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _PROBABILITY:
            position, name = _PROBABILITY[func]
            if len(args) > position:
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif name in kwargs or name == "p":
                kwargs[name] = 0.0
        return func(*args, **kwargs)
