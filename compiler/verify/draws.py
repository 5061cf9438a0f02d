"""Gives every draw but dropout a value that is no matter of chance: both sides then compute with the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

# The value of a draw, from its arguments.
Value = Callable[..., Any]


def _between(*bounds: int | None) -> int:
    """The middle of `high` or `low, high`, as randint and random_ take them."""
    given = [bound for bound in bounds if bound is not None]
    low, high = (0, *given)[-2:] if given else (0, 2)
    return low + (high - low) // 2


def _integer(*args: Any, low: int | None = None, high: int | None = None, **_: Any) -> int:
    return _between(*(arg for arg in args if isinstance(arg, int)), low, high)


def _random(*args: int | None, to: int | None = None, **more: Any) -> int:
    return _between(*args, more.get("from"), to)


def _uniform(low: float = 0.0, high: float = 1.0, **more: Any) -> float:
    low, high = more.get("from", low), more.get("to", high)
    return low + (high - low) / 2


def _normal(mean: float = 0.0, std: float = 1.0, **_: Any) -> float:
    return mean + std  # not the mean: what scales the noise must matter


def _probability(p: Any = 0.5, **_: Any) -> Any:
    return p


_FUNCTIONS: dict[str, Value] = {
    "rand": lambda *_, **__: 0.5,
    "rand_like": lambda *_, **__: 0.5,
    "randn": lambda *_, **__: 1.0,
    "randn_like": lambda *_, **__: 1.0,
    "randint": _integer,
    "randint_like": _integer,
    "randperm": lambda n, **_: torch.arange(n - 1, -1, -1),
    "bernoulli": lambda probabilities, p=None, **_: probabilities if p is None else p,
    "normal": lambda mean, std=1.0, *_, **__: _normal(mean, std),
}
_METHODS: dict[str, Value] = {
    "bernoulli_": _probability,
    "uniform_": _uniform,
    "normal_": _normal,
    "exponential_": lambda lambd=1.0, **_: 1.0 / lambd,
    "random_": _random,
    "geometric_": lambda p, **_: math.ceil(1.0 / p),
    "cauchy_": lambda median=0.0, sigma=1.0, **_: median + sigma,
    "log_normal_": lambda mean=1.0, std=2.0, **_: math.exp(mean),
}


def _write(drawn: torch.Tensor, value: Any) -> torch.Tensor:
    """`drawn`, overwritten; between 0 and 1 where whole numbers are drawn is 1."""
    value = torch.as_tensor(value).detach()
    whole = not drawn.dtype.is_floating_point and not drawn.dtype.is_complex
    return drawn.copy_(value.ceil() if whole and value.is_floating_point() else value)


def _fixed(draw: Callable[..., torch.Tensor], value: Value, *, skipped: int) -> Callable[..., torch.Tensor]:
    """The draw, its result overwritten by the value; `skipped`: arguments that it does not depend on."""

    def fixed(*args: Any, **kwargs: Any) -> torch.Tensor:
        known = {name: given for name, given in kwargs.items() if name != "generator"}
        return _write(draw(*args, **kwargs), value(*args[skipped:], **known))

    return fixed


class _Fixed(TorchFunctionMode):
    """Catches functions that were imported by name."""

    def __init__(self, replaced: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.replaced = replaced

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self.replaced.get(func) or func)(*args, **(kwargs or {}))


@contextmanager
def draws_fixed() -> Iterator[None]:
    """While active every draw but dropout gives the same values, whatever its seed, shape or part of the batch."""
    places = [(torch, name, value, 0) for name, value in _FUNCTIONS.items()]
    places += [(torch.Tensor, name, value, 1) for name, value in _METHODS.items()]
    places.append((torch.Tensor, "bernoulli", _FUNCTIONS["bernoulli"], 0))
    fixed = {(where, name): _fixed(getattr(where, name), value, skipped=s) for where, name, value, s in places}
    by_function = {getattr(where, name): function for (where, name), function in fixed.items()}
    with ExitStack() as stack:
        stack.enter_context(_Fixed(by_function))
        for (where, name), function in fixed.items():
            stack.enter_context(patch.object(where, name, function))
        yield
