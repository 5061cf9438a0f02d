"""Values of a running program as hashable data, to tell whether two modules or two moments are alike.

Plain values and containers are held by value, objects of users' classes by their attributes, functions by their code
and what they close over. What cannot be looked into is held by identity: alike only if it is the same object.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MAX_DEPTH = 6
MAX_ITEMS = 1000
MAX_TENSOR_ELEMENTS = 256
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
# Attributes of every nn.Module (tensors, submodules, hooks and the mode are looked at elsewhere), and the hook's.
OF_MODULES = frozenset((*nn.Module().__dict__, "forward"))


@dataclass(slots=True)
class Snapshot:
    """Takes pictures of values; what several of them share is looked at once. `parts`: ids of a block's modules."""

    parts: Mapping[int, int] = field(default_factory=dict)
    _seen: dict[int, Hashable] = field(default_factory=dict)
    _alive: list[object] = field(default_factory=list)

    def of(self, value: Any, depth: int = 0) -> Hashable:
        """The picture of one value."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            return kind, value
        if isinstance(value, nn.Module):
            part = self.parts.get(id(value))
            return ("part", part) if part is not None else ("module", id(value))
        if depth > MAX_DEPTH:
            return "object", id(value)
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = ("inside itself", kind)
        found = self._looked_into(value, kind, depth + 1)
        self._seen[id(value)] = found
        self._alive.append(value)
        return found

    def _looked_into(self, value: Any, kind: type, depth: int) -> Hashable:
        if isinstance(value, Tensor):
            return _of_tensor(value)
        if isinstance(value, list | tuple | set | frozenset | dict) and len(value) > MAX_ITEMS:
            return kind, id(value), len(value)
        if isinstance(value, list | tuple):
            return kind, tuple(self.of(item, depth) for item in value)
        if isinstance(value, set | frozenset):
            return kind, frozenset(self.of(item, depth) for item in value)
        if isinstance(value, dict):
            return kind, tuple((self.of(key, depth), self.of(item, depth)) for key, item in value.items())
        if isinstance(value, types.FunctionType):
            return self._of_function(value, depth)
        if isinstance(value, types.MethodType):
            return "method", self.of(value.__self__, depth), self.of(value.__func__, depth)
        attributes = getattr(value, "__dict__", None)
        if (
            isinstance(value, type | types.ModuleType)
            or not isinstance(attributes, dict)
            or len(attributes) > MAX_ITEMS
        ):
            return "object", id(value)
        if kind.__module__.split(".")[0] in ("torch", "logging", "threading"):
            return "object", id(value)
        return kind, tuple((key, self.of(item, depth)) for key, item in attributes.items())

    def _of_function(self, function: types.FunctionType, depth: int) -> Hashable:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        return (
            function.__code__,
            tuple(self.of(cell, depth) for cell in cells),
            self.of(function.__defaults__, depth),
            self.of(function.__kwdefaults__, depth),
        )

    def of_attributes(self, module: nn.Module) -> dict[str, Hashable]:
        """Every attribute of a module itself."""
        return {name: self.of(value) for name, value in module.__dict__.items() if name not in OF_MODULES}


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _of_tensor(value: Tensor) -> Hashable:
    """Small tensors with values by value."""
    if type(value) is Tensor and value.device.type == "cpu" and value.numel() <= MAX_TENSOR_ELEMENTS:
        return "tensor", tuple(value.shape), value.dtype, value.requires_grad, repr(value.detach().tolist())
    return "tensor", id(value), value._version


@dataclass(frozen=True, slots=True)
class Globals:
    """The global variables that some code can read: (namespace, name) pairs, functions and modules followed."""

    places: tuple[tuple[dict[str, Any], str], ...]

    def picture(self) -> Hashable:
        snapshot = Snapshot()
        return tuple(snapshot.of(space.get(name)) for space, name in self.places)


def globals_of(classes: Iterable[type]) -> Globals:
    """The global state that methods of these classes can read; torch's own classes are taken to have none."""
    places: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    pending: list[types.FunctionType] = []
    for kind in classes:
        for base in kind.__mro__:
            if _is_torch(base.__module__):
                continue
            for name, value in vars(base).items():
                function = _function_in(value)
                if function is not None:
                    pending.append(function)
                elif not name.startswith("__") and not isinstance(value, property | classmethod | staticmethod):
                    places[id(base), name] = (_ClassSpace(base), name)
    seen: set[int] = set()
    while pending:
        function = pending.pop()
        if id(function.__code__) in seen or _is_torch(function.__module__ or ""):
            continue
        seen.add(id(function.__code__))
        for cell in function.__closure__ or ():
            inner = _function_in(_content(cell))
            if inner is not None:
                pending.append(inner)
        names = _names(function.__code__)
        for space in (function.__globals__, *_modules_named(function.__globals__, names)):
            for name in names:
                if name in space:
                    inner = _function_in(space[name])
                    if inner is not None:
                        pending.append(inner)
                    elif not isinstance(space[name], types.ModuleType | type | types.BuiltinFunctionType):
                        places[id(space), name] = (space, name)
    return Globals(tuple(places.values()))


class _ClassSpace(dict[str, Any]):
    """The attributes of a class, read when asked for."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self._kind).get(name, default)


def _is_torch(module: str) -> bool:
    return module.split(".")[0] in ("torch", "builtins", "abc", "typing")


def _function_in(value: object) -> types.FunctionType | None:
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = getattr(value, "__wrapped__", value) if not isinstance(value, type | types.ModuleType) else value
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _modules_named(space: Mapping[str, Any], names: set[str]) -> list[dict[str, Any]]:
    modules = [space[name] for name in names if isinstance(space.get(name), types.ModuleType)]
    return [vars(module) for module in modules if not _is_torch(module.__name__)]
