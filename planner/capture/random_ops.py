"""Which operations draw random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .graph import Arg

_DROPOUTS = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")
_ATTENTION = "aten.scaled_dot_product_attention.default"
RECURRENT = ("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input")


def is_random(op: str, args: Sequence[Arg], kwargs: Sequence[tuple[str, Arg]] = ()) -> bool:
    """Whether the operation draws random numbers in training, with these arguments."""
    if op in _DROPOUTS:
        return args[1] != 0 and args[2] is not False
    if op == _ATTENTION:
        return len(args) > 4 and args[4] != 0
    if op in RECURRENT:
        return args[5] != 0 and args[6] is not False
    return _is_tagged(op)


@cache
def _is_tagged(op: str) -> bool:
    import torch

    namespace, name, overload = op.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    return torch.Tag.nondeterministic_seeded in found.tags or name in ("rrelu", "rand", "randn", "randint", "randperm")
