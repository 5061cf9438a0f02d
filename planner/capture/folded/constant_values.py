"""Values that follow from nothing but the program's own constants: what a branch on them reads is known ahead of time.

`nn.Transformer` compares its mask with a causal one, both made by factories. Such a value is computed on the CPU, from
the part of the recorded graph that it is made by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from ..random_ops import is_random

# Operations that hand a value to Python.
READS = frozenset({"item", "_local_scalar_dense", "is_nonzero", "equal"})
_MOST_ELEMENTS = 1 << 26  # of one value: what a capture may take of a machine's memory


def known_value(func: Callable[..., Any], args: tuple[Any, ...]) -> object:
    """What `func` reads; None where the value depends on tensors from elsewhere or on chance, or is too large.

    `args` are nodes and plain values.
    """
    made = _made_by(args)
    if not all(map(_is_constant, made)) or _are_written(made):
        return None
    values: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch.no_grad():
        for node in sorted(made):
            assert callable(node.target)
            values[node] = node.target(*_on_cpu(node.args, values), **_on_cpu(node.kwargs, values))
        return func(*_on_cpu(args, values))


def _made_by(args: tuple[Any, ...]) -> set[fx.Node]:
    """The nodes of the arguments and all that they are computed from."""
    found: set[fx.Node] = set()
    open_nodes = [arg for arg in args if isinstance(arg, fx.Node)]
    while open_nodes:
        node = open_nodes.pop()
        if node not in found:
            found.add(node)
            open_nodes.extend(node.all_input_nodes)
    return found


def _is_constant(node: fx.Node) -> bool:
    if node.op == "placeholder" or node.meta["context"].autocast:
        return False
    value = node.meta["val"]
    sizes = [item.numel() for item in (value if isinstance(value, list | tuple) else (value,))]
    is_operation = isinstance(node.target, torch._ops.OpOverload)
    return max(sizes) <= _MOST_ELEMENTS and not (is_operation and is_random(str(node.target), node.args))


def _are_written(made: set[fx.Node]) -> bool:
    """Whether an operation so far writes into the memory of these: the order of writes is not followed here."""
    places = {place for node in made for place in _places(node)}
    return any(
        places.intersection(_places(argument))
        for graph in {node.graph for node in made}
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        for argument in node.all_input_nodes
    )


def _places(node: fx.Node) -> Iterator[int]:
    value = node.meta["val"]
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor):
            yield item.untyped_storage()._cdata


def _on_cpu(arg: Any, values: Mapping[fx.Node, Any]) -> Any:
    if isinstance(arg, fx.Node):
        return values[arg]
    if isinstance(arg, list | tuple):
        return type(arg)(_on_cpu(item, values) for item in arg)
    if isinstance(arg, dict):
        return {key: _on_cpu(item, values) for key, item in arg.items()}
    return torch.device("cpu") if isinstance(arg, torch.device) else arg
