"""Meta tensors without the compiler: what a process that only captures must not wait for.

On meta, `torch` computes shapes in Python functions that are marked "not for the compiler", and the first call of one
imports the whole compiler (`torch._dynamo`, 1 to 2 s) to say so; questions about sizes import sympy, in case a size is
a symbol. Inside `light_meta()` the marks are noted without the compiler, and sizes are plain numbers. What stands in
becomes the real module as soon as anything else is asked of it. Private names used: `torch._dynamo.disable` (which
`torch._compile` calls), `__dynamo_disable` on the marked functions, and the functions of
`torch.fx.experimental.symbolic_shapes` named below.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_MARK = "__dynamo_disable"


class _Lazy(types.ModuleType):
    """Stands in for a module: has a few names, and becomes the real one when anything else is asked for."""

    def __init__(self, name: str, *, is_package: bool, names: Mapping[str, object]) -> None:
        super().__init__(name)
        self.__dict__.update(names)
        self.__dict__["_names"], self.__dict__["_is_package"] = tuple(names), is_package

    def __getattr__(self, name: str) -> Any:
        is_in_place = sys.modules.get(self.__name__) is self
        if is_in_place and name.startswith("__") and not (name == "__path__" and self._is_package):
            raise AttributeError(name)  # the import system and `inspect` look at every module
        self.withdraw()
        return getattr(importlib.import_module(self.__name__), name)

    def withdraw(self) -> None:
        """Leave the place to the real module; who holds this one reaches the real one's names through it."""
        for name in self._names:
            self.__dict__.pop(name, None)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            parent, _, child = self.__name__.rpartition(".")
            above = sys.modules.get(parent)
            if above is not None and above.__dict__.get(child) is self:
                del above.__dict__[child]


@contextlib.contextmanager
def _lazy(name: str, names: Mapping[str, object], *, is_package: bool) -> Iterator[None]:
    if name in sys.modules:
        yield
        return
    stand_in = sys.modules[name] = _Lazy(name, is_package=is_package, names=names)
    try:
        yield
    finally:
        stand_in.withdraw()


@contextlib.contextmanager
def _without_compiler() -> Iterator[None]:
    marked: list[Callable[..., Any]] = []

    def disable(function: Callable[..., Any], recursive: bool, *, wrapping: bool) -> Callable[..., Any]:
        marked.append(function)
        return function

    try:
        with _lazy("torch._dynamo", {"disable": disable}, is_package=True):
            yield
    finally:
        for function in marked:
            function.__dict__.pop(_MARK, None)


# Questions about sizes, answered for plain numbers. A symbol cannot exist before the real module has made it.


def _plain(value: Any) -> Any:
    assert not isinstance(value, torch.SymInt | torch.SymBool), "a symbol made without torch.fx's module of symbols"
    return value


def _always(value: Any) -> bool:
    return _plain(value) is not None


def _never(value: Any) -> bool:
    return _plain(value) is None


def _equal(one: Any, other: Any) -> bool:
    return tuple(one) == tuple(other) if isinstance(one, list | tuple) else _plain(one) == _plain(other)


def _all(*values: Any) -> bool:
    return all(map(_plain, values))


def _any(*values: Any) -> bool:
    return any(map(_plain, values))


_QUESTIONS: dict[str, Callable[..., Any]] = {
    "guard_int": _plain, "guard_scalar": _plain, "guard_bool": _plain, "guard_size_oblivious": _plain,
    "guard_or_false": _plain, "guard_or_true": _plain,
    "statically_known_true": _plain, "guarding_hint_or_throw": _plain, "has_guarding_hint": _always,
    "has_static_value": _always, "is_nested_int": _never, "sym_eq": _equal, "sym_and": _all, "sym_or": _any,
    "expect_true": lambda value, skip=0: _plain(value),
}  # fmt: skip


class Unfilled(TorchFunctionMode):
    """While a module is built: random initialisation of a meta tensor returns it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FILLING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_DRAWN = (
    "normal_",
    "uniform_",
    "trunc_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
)
_FILLING = frozenset(
    getattr(place, name) for place in (torch.nn.init, Tensor) for name in _DRAWN if hasattr(place, name)
)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A capture makes many objects and frees few: looking for garbage takes a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def light_meta() -> Iterator[None]:
    """Let the code of this block compute with meta tensors without importing the compiler or sympy."""
    with (
        _without_compiler(),
        _lazy("sympy", {"Basic": type("Basic", (), {})}, is_package=True),
        _lazy("torch.utils._sympy.functions", {"Max": type("Max", (), {})}, is_package=False),
        _lazy("torch.fx.experimental.symbolic_shapes", _QUESTIONS, is_package=False),
    ):
        yield
