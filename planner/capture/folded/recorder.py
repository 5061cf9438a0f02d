"""Runs a function on tensors without data and writes down every ATen operation: an FX graph as torch.export makes it.

Each node's meta has "val" (its result), and "context": where in the user's program it was called. What cannot be
written down faithfully raises `CannotRecord`; the caller then uses torch.export.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..constants import constant_of
from ..flat import ModuleCall
from ..graph import Kind
from ..user_lines import running
from . import torch_private
from .constant_values import READS, known_value
from .refusals import CannotRecord

# Operations that answer about the tensor's type, not about its values.
_METADATA = frozenset(
    {
        "is_same_size",
        "result_type",
        "can_cast",
        "_has_compatible_shallow_copy_type",
        "is_floating_point",
        "is_complex",
        "promote_types",
    }
)


@dataclass(frozen=True, slots=True)
class Context:
    """Where an operation was called. `source`: the user's innermost line."""

    calls: tuple[ModuleCall, ...]
    source: str
    grad_enabled: bool
    autocast: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a placeholder stands for. `values`: of a constant, as nested tuples."""

    kind: Kind
    name: str
    tensor: Tensor
    values: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A finished graph. `sources`: by placeholder name, in order of first use (inputs first)."""

    graph: fx.Graph
    sources: Mapping[str, Source]
    has_autocast: bool


@dataclass(slots=True)
class ModuleCalls:
    """Which module calls are active. Modules that the root does not know are passed over, as torch.export does."""

    paths: Mapping[int, str]  # id of a module -> its path in the root
    stack: list[ModuleCall] = field(default_factory=list)
    _counts: dict[str, int] = field(default_factory=dict)

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the calls of modules in this block."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self.paths.get(id(module))
            if path is None:
                return original(module, *args, **kwargs)
            count = self._counts.get(path, 0)
            self._counts[path] = count + 1
            kind = type(module)
            self.stack.append(ModuleCall(f"{path}@{count}", path, f"{kind.__module__}.{kind.__qualname__}"))
            try:
                return original(module, *args, **kwargs)
            finally:
                self.stack.pop()

        nn.Module.__call__ = call  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        finally:
            nn.Module.__call__ = original  # pyright: ignore[reportAttributeAccessIssue]


class Recorder(torch_private.PreDispatchMode):
    """The mode. `known`: parameters and buffers by id, as (kind, name); they become placeholders on first use."""

    def __init__(self, known: Mapping[int, Source], calls: ModuleCalls) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.calls = calls
        self.sources: dict[str, Source] = {}
        self.has_autocast = False
        self._known = known
        self._nodes: dict[int, fx.Node] = {}
        self._alive: list[Tensor] = []  # ids stay unique while their tensors live
        # Results of factories, by storage: what `torch.arange` returns is a copy of the tensor that is seen here.
        self._made: dict[int, Tensor] = {}

    def input(self, name: str, tensor: Tensor) -> None:
        """Add an input; the same tensor given twice stays the first."""
        if id(tensor) not in self._nodes:
            self._placeholder(Source(kind=Kind.INPUT, name=name, tensor=tensor))

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node whose value this tensor is."""
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is not None and not tensor.requires_grad and _same_place(made, tensor):
            self._track(tensor, self._nodes[id(made)])
            return self._nodes[id(made)]
        source = self._known.get(id(tensor))
        return self._placeholder(source if source is not None else self._constant(tensor))

    def knows(self, tensor: Tensor) -> bool:
        """Whether this tensor is an input, parameter, buffer or a value of the graph."""
        return id(tensor) in self._nodes or id(tensor) in self._known or tensor.untyped_storage()._cdata in self._made

    def _placeholder(self, source: Source) -> fx.Node:
        node = self.graph.placeholder(f"{source.kind.value}_{len(self.sources)}")
        node.meta["val"] = source.tensor
        self.sources[node.name] = source
        self._track(source.tensor, node)
        return node

    def _constant(self, tensor: Tensor) -> Source:
        from torch._subclasses.fake_tensor import FakeTensor

        if tensor.is_meta or isinstance(tensor, FakeTensor):
            raise CannotRecord("a tensor without data that is no input, parameter or buffer")
        if tensor.requires_grad or tensor.device.type != "cpu" or type(tensor) is not Tensor:
            raise CannotRecord("a tensor that is no input, parameter or buffer")
        name = f"constant_{len(self.sources)}"
        with _disable_current_modes():
            values = constant_of(tensor, name)
        return Source(kind=Kind.CONSTANT, name=name, tensor=tensor, values=values)

    def _track(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)

    def context(self) -> Context:
        """Where the user's program is now."""
        autocast = torch._C._is_any_autocast_enabled()
        self.has_autocast = self.has_autocast or autocast
        return Context(tuple(self.calls.stack), running(), torch.is_grad_enabled(), autocast)

    def append(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> fx.Node:
        """Add a call with this result (a tensor or a sequence of tensors)."""
        args = tuple(self._argument(arg) for arg in args)
        node = self.graph.call_function(target, args, {key: self._argument(arg) for key, arg in kwargs.items()})
        node.meta["val"] = result
        node.meta["context"] = self.context()
        if isinstance(result, Tensor):
            self._track(result, node)
            if _is_factory(node):
                self._made[result.untyped_storage()._cdata] = result
        elif isinstance(result, list | tuple):
            for index, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._track(item, self._item(node, index, item))
        return node

    def _item(self, node: fx.Node, index: int, value: Tensor) -> fx.Node:
        item = self.graph.call_function(operator.getitem, (node, index))
        item.meta["val"], item.meta["context"] = value, node.meta["context"]
        return item

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, list | tuple):
            return tuple(self._argument(item) for item in value)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise CannotRecord("a size that depends on the values of a tensor")
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise CannotRecord(f"the operator {func}")
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if torch_private.in_transform():
            raise CannotRecord("a torch.func transform")
        if func._opname == "detach_" and not args[0].requires_grad:
            return args[0]  # what `torch.tensor` does last
        if torch.Tag.inplace_view in func.tags and func._opname != "detach_":
            raise CannotRecord(f"{func} changes the shape of a tensor in place")
        if func._opname in READS:
            value = known_value(func, self._argument(args))
            if value is None:
                raise CannotRecord(f"{func} reads the value of a tensor")
            return value
        result = func(*args, **kwargs)
        items = result if isinstance(result, list | tuple) else (result,)
        if all(item is None for item in items):
            if func._schema.name.startswith(("aten::_assert", "aten::sym_constrain")):
                return result
            raise CannotRecord(f"{func} has no result")
        if not all(isinstance(item, Tensor) for item in items):
            if func._opname in _METADATA:
                return result
            raise CannotRecord(f"{func} reads the value of a tensor")
        self.append(func, args, kwargs, result)
        return result

    def finish(self, outputs: Sequence[Tensor]) -> Recording:
        """Close the graph."""
        self.graph.output(tuple(self.node_of(tensor) for tensor in outputs))
        return Recording(graph=self.graph, sources=self.sources, has_autocast=self.has_autocast)


def _is_factory(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return not node.all_input_nodes or name.endswith("_like") or name.startswith("new_")


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one storage hold the same elements in the same order."""
    return (one.shape, one.stride(), one.storage_offset(), one.dtype) == (
        other.shape, other.stride(), other.storage_offset(), other.dtype,
    )  # fmt: skip
