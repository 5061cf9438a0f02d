"""Train against eval mode: which literals of the captured graph are `self.training`.

A second export would say, but costs as much as the first. So the step is first run twice on meta tensors, recording its
calls of torch functions: where the two runs differ in nothing but dropout, the training graph is the eval graph too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .flat import FlatGraph, FlatNode, live_nodes
from .graph import Arg, Ref, Symbol
from .step import TrainingStep

TRAINING = Symbol("training", "")
_DROPOUT_CALLS = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout)
_DROPOUT_OPS = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")


class _Calls(TorchFunctionMode):
    """Records every call of a torch function, tensors by the order in which they appeared."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        for tensor in inputs:
            self.number(tensor)

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._numbers)
            self._alive.append(tensor)
        return self._numbers[id(tensor)]

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor", self.number(value)
        if isinstance(value, list | tuple):
            return tuple(self._described(item) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._described(item)) for key, item in value.items())
        return type(value), value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, (self._described(args), self._described(kwargs))))
        result = func(*args, **kwargs)
        self.calls.append(("result", self._described(result)))
        return result


def flags_by_calls(step: TrainingStep, tensors: Sequence[Tensor], graph: FlatGraph) -> FlatGraph | None:
    """The training graph with its training flags, if two recorded runs prove them; None: unknown."""
    train, evaluation = _recorded(step.train(), tensors), _recorded(step.eval(), tensors)
    step.train()
    if train is None or evaluation is None or len(train) != len(evaluation):
        return None
    dropped = 0
    for (function, one), (other_function, other) in zip(train, evaluation, strict=True):
        if function is not other_function and function != other_function:
            return None
        if _equal(one, other):
            continue
        changed = _leaves_that_differ(one, other)
        if function in _DROPOUT_CALLS and changed == [(True, False)]:
            probabilities = [leaf for leaf in _leaves(one) if isinstance(leaf, float)]
            dropped += probabilities[:1] != [0.0]
        elif function is not F.scaled_dot_product_attention or not all(_is_off(*pair) for pair in changed):
            return None
    nodes = [node for node in graph.nodes if node.op in _DROPOUT_OPS and node.args[2] is True]
    if len(nodes) != dropped:
        return None
    names = {node.name for node in nodes}
    return replace(
        graph,
        nodes=tuple(
            replace(node, args=(*node.args[:2], TRAINING, *node.args[3:])) if node.name in names else node
            for node in graph.nodes
        ),
    )


def _recorded(step: TrainingStep, tensors: Sequence[Tensor]) -> list[tuple[Any, Any]] | None:
    calls = _Calls(tensors)
    try:
        with torch.no_grad(), calls:
            loss = step(*tensors)
    except Exception:
        return None  # the export in eval mode will say what is wrong
    calls.calls.append(("loss", calls.number(loss)))
    return calls.calls


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False


def _leaves(described: Any) -> list[Any]:
    if isinstance(described, tuple):
        return [leaf for item in described for leaf in _leaves(item)]
    return [described]


def _leaves_that_differ(one: Any, other: Any) -> list[tuple[Any, Any]]:
    ours, theirs = _leaves(one), _leaves(other)
    if len(ours) != len(theirs):
        return [(one, other)]
    return [(a, b) for a, b in zip(ours, theirs, strict=True) if not _equal(a, b)]


def _is_off(train: object, evaluation: object) -> bool:
    """A dropout probability in training that is 0 in eval mode: random operations draw in training only."""
    return isinstance(train, float) and 0 < train < 1 and evaluation == 0.0


# By a second export


def flags_by_graphs(train: FlatGraph, evaluation: FlatGraph) -> tuple[FlatGraph, tuple[str, ...]]:
    """The training graph with literals that are True in train and False in eval mode replaced by `self.training`.

    A note says where the two differ in more; then the flags stay as they are in training.
    """
    ours, theirs = live_nodes(train, with_buffers=False), live_nodes(evaluation, with_buffers=False)
    rename: dict[str, str] = {}
    flagged: dict[str, FlatNode] = {}
    for left, right in zip(ours, theirs, strict=False):
        rename[right.name] = left.name
        same = left.op == right.op and left.kind is right.kind and left.outputs == right.outputs
        same = same and len(left.args) == len(right.args)
        same = same and [key for key, _ in left.kwargs] == [key for key, _ in right.kwargs]
        if same:
            args = tuple(_merged(a, b, rename) for a, b in zip(left.args, right.args, strict=True))
            pairs = zip(left.kwargs, right.kwargs, strict=True)
            kwargs = tuple((key, _merged(a, b, rename)) for (key, a), (_, b) in pairs)
            same = _DIFFERENT not in args and _DIFFERENT not in [value for _, value in kwargs]
            flagged[left.name] = replace(left, args=args, kwargs=kwargs)
        if not same:
            return train, (f"eval mode runs other operations than training, first at {left.source or left.name}",)
    if len(ours) != len(theirs):
        return train, ("eval mode runs other operations than training",)
    return replace(train, nodes=tuple(flagged.get(node.name, node) for node in train.nodes)), ()


@dataclass(frozen=True, slots=True)
class _Different:
    """The mark of arguments that differ between the modes."""

    reason: str = field(default="differs")


_DIFFERENT = _Different()


def _merged(train: Arg, evaluation: Arg, rename: Mapping[str, str]) -> Arg:
    if isinstance(train, Ref):
        same = isinstance(evaluation, Ref) and rename.get(evaluation.node) == train.node
        return train if same and isinstance(evaluation, Ref) and evaluation.index == train.index else _DIFFERENT
    if isinstance(train, tuple) and isinstance(evaluation, tuple) and len(train) == len(evaluation):
        items = tuple(_merged(a, b, rename) for a, b in zip(train, evaluation, strict=True))
        return _DIFFERENT if _DIFFERENT in items else items
    if train is True and evaluation is False:
        return TRAINING
    if _is_off(train, evaluation):
        return train
    return train if train == evaluation else _DIFFERENT
