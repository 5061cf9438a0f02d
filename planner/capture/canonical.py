"""An exported FX graph -> the canonical flat graph: functional, one spelling per operation, regions inlined."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from ..errors import UnsupportedModel
from .builder import Builder
from .cells import Cell, read_all
from .flat import FlatGraph, FlatNode, ModuleCall
from .folded.refusals import CannotFold
from .graph import Kind, ModelInput, Ref, TensorType
from .spelling import append, append_functional, written_argument
from .stamps import Stamp, make_stamp
from .unview import unview_of
from .user_lines import in_stack_trace

if TYPE_CHECKING:
    from .folded.block_calls import BlockCall

_PREFIX = "model."  # the user's module inside the training step
# Operations that write their buffers as a known side effect; the rules know it.
_UPDATES_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A placeholder of the exported graph. `constant`: nested tuples, for a small lifted tensor."""

    kind: Kind
    name: str  # FQN of a parameter or buffer, else the name of the input or constant
    requires_grad: bool = False
    constant: object = None


class HasGraph(Protocol):
    """A graph module, or a recording."""

    @property
    def graph(self) -> fx.Graph: ...


def tensor_type(value: torch.Tensor) -> TensorType:
    """Type of a (fake) tensor.

    Raises:
        UnsupportedModel: a size depends on the values of a tensor.
    """
    try:
        shape = tuple(int(size) for size in value.shape)
    except Exception as error:
        raise UnsupportedModel(f"a size depends on the values of a tensor: {list(value.shape)}") from error
    return TensorType(shape=shape, dtype=str(value.dtype).removeprefix("torch."))


@dataclass(slots=True)
class Translator:
    """Walks the graph and its regions."""

    builder: Builder = field(default_factory=Builder)
    names: Mapping[str, str] = field(default_factory=dict)  # FQN of a parameter or buffer -> its canonical one
    autocast: bool = False
    _env: dict[fx.Node, Any] = field(default_factory=dict)
    _storages: dict[int, Cell] = field(default_factory=dict)
    leaves: list[tuple[Leaf, Cell, Ref]] = field(default_factory=list)
    _tensors: dict[str, Cell] = field(default_factory=dict)
    _stamps: dict[Hashable, Stamp] = field(default_factory=dict)

    def translate(
        self, module: HasGraph, leaves: Mapping[str, Leaf], batch_dims: Mapping[str, int | None]
    ) -> FlatGraph:
        """Translate the graph of a step, whose one output is the loss."""
        (output,) = self.run(module, leaves)
        inputs = [
            ModelInput(name=leaf.name, type=self.builder.type_of(first), batch_dim=batch_dims.get(leaf.name))
            for leaf, _, first in self.leaves
            if leaf.kind is Kind.INPUT
        ]
        updates = {
            leaf.name: cell.read()
            for leaf, cell, first in self.leaves
            if leaf.kind is Kind.BUFFER and cell.read() != first
        }
        return FlatGraph(
            nodes=tuple(self.builder.nodes), inputs=tuple(inputs), loss=output.read(), buffer_updates=updates
        )

    def run(self, module: HasGraph, leaves: Mapping[str, Leaf]) -> tuple[Cell, ...]:
        """Translate a graph; `leaves` tells by name what its placeholders are. Its outputs."""
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._env[node] = self.leaf(leaves[node.name], node.meta["val"])
        outputs = self._walk(module)
        for leaf, cell, _ in self.leaves:
            if leaf.kind is Kind.PARAMETER and cell.version:
                raise UnsupportedModel(
                    f"the forward writes to parameter {leaf.name}",
                    fix="update parameters in the optimizer, or make it a buffer",
                )
        return outputs

    def leaf(self, leaf: Leaf, tensor: torch.Tensor) -> Cell:
        """The cell of an input, parameter, buffer or constant; tied tensors have one."""
        is_tensor = leaf.kind in (Kind.PARAMETER, Kind.BUFFER)
        if is_tensor and leaf.name in self._tensors:  # tied
            return self._tensors[leaf.name]
        value = replace(tensor_type(tensor), requires_grad=leaf.requires_grad)
        ref = self.builder.leaf(leaf.kind, leaf.name, value, fqn=leaf.name if is_tensor else "", constant=leaf.constant)
        cell = self._cell(ref, tensor, owner=leaf.name)
        self.leaves.append((leaf, cell, ref))
        if is_tensor:
            self._tensors[leaf.name] = cell
        return cell

    def _cell(self, ref: Ref, value: torch.Tensor, owner: str = "") -> Cell:
        cell = Cell(ref, owner=owner)
        self._storages.setdefault(_storage(value), cell)
        return cell

    def _walk(self, module: HasGraph) -> tuple[Cell, ...]:
        for node in module.graph.nodes:
            if node.op == "output":
                return tuple(self._value(item) for item in _flat(node.args[0]))
            if node.op == "call_function":
                self._visit(module, node)
        raise UnsupportedModel("the exported graph has no output")

    def _value(self, arg: Any) -> Any:
        """An FX argument with nodes replaced by cells."""
        if isinstance(arg, fx.Node):
            return self._env[arg]
        if isinstance(arg, list | tuple):
            return tuple(self._value(item) for item in arg)
        return arg

    def _visit(self, module: HasGraph, node: fx.Node) -> None:
        self._enter_context(node)
        if node.target is operator.getitem:
            self._env[node] = self._value(node.args[0])[node.args[1]]
        elif isinstance(node.target, torch._ops.OpOverload):
            self._operation(node, node.target)
        elif "block" in node.meta:
            self._env[node] = self._block(node, node.meta["block"])
        elif getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            enabled, region, *args = node.args
            before, self.builder.grad_enabled = self.builder.grad_enabled, bool(enabled)
            self._env[node] = self._region(module, region, args)
            self.builder.grad_enabled = before
        elif getattr(node.target, "__name__", "") == "wrap_with_autocast":
            _, _, enabled, _, region, *args = node.args
            before, self.autocast = self.autocast, bool(enabled)
            self._env[node] = self._region(module, region, args)
            self.autocast = before
        else:
            raise UnsupportedModel(
                f"cannot plan {getattr(node.target, '__name__', node.target)}",
                where=self.builder.source,
                fix="write this part with plain tensor operations",
            )

    def _enter_context(self, node: fx.Node) -> None:
        """Where in the user's program the node lies: exported graphs say it by names, recorded ones by a `Context`."""
        context = node.meta.get("context")
        if context is None:
            self.builder.calls = _calls(node)
            self.builder.source = in_stack_trace(node.meta.get("stack_trace") or "")
        else:
            self.builder.calls, self.builder.source = context.calls, context.source
            self.builder.grad_enabled, self.autocast = context.grad_enabled, context.autocast

    def _region(self, module: HasGraph, region: Any, args: Sequence[Any]) -> tuple[Cell, ...]:
        inner = getattr(module, region.target)
        places = [node for node in inner.graph.nodes if node.op == "placeholder"]
        for place, arg in zip(places, args, strict=True):
            self._env[place] = self._value(arg)
        return self._walk(inner)

    def _block(self, node: fx.Node, call: BlockCall) -> tuple[Cell, ...]:
        """Stamp the nodes of a repeated block's template."""
        arguments = tuple(self._value(arg).read() for arg in node.args[0])  # pyright: ignore
        types = tuple(self.builder.type_of(ref) for ref in arguments)
        key = (id(call.template), types)
        if key not in self._stamps:
            self._stamps[key] = make_stamp(call.template.recording, types, call.group)
        return self._stamps[key].apply(self, call, arguments, node.meta["val"])

    def tensor(self, call: BlockCall, node: FlatNode) -> Cell:
        """The cell of a parameter or buffer of a block, given its node in the block's own graph."""
        tensor = call.tensors[node.name]
        fqn = f"{call.fqn}.{node.name}"
        leaf = Leaf(kind=node.kind, name=self.names.get(fqn, fqn), requires_grad=node.outputs[0].requires_grad)
        return self.leaf(leaf, tensor)

    def result(self, ref: Ref, value: torch.Tensor, sealed_by: int | None) -> Cell:
        """The cell of a block's result; `sealed_by`: its group, where writing to it would write elsewhere too."""
        cell = self._cell(ref, value)
        cell.sealed_by = sealed_by
        return cell

    # Operations

    def _operation(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        op = str(target)
        values = node.meta.get("val")
        results: list[Any] = list(values) if isinstance(values, list | tuple) else [values]
        if not all(isinstance(value, torch.Tensor) for value in results):
            if _is_effectless(target) or all(value is None for value in results):
                return
            raise UnsupportedModel(
                f"{op} reads a tensor's value",
                where=self.builder.source,
                fix="keep sizes and branches independent of tensor values",
            )
        out = tuple(tensor_type(value) for value in results)
        bound = self._bound(target, node.args, node.kwargs)
        written = written_argument(target) if op not in _UPDATES_STATISTICS else None
        if written is not None:
            self._in_place(node, target, written, bound, out)
            return
        operands = {name: read_all(value) for name, value in bound.items()}
        refs = append(self.builder, target, operands, out, autocast=self.autocast)
        cells = tuple(
            self._view_or_new(target, bound, ref, value, index, out)
            for index, (ref, value) in enumerate(zip(refs, results, strict=True))
        )
        self._env[node] = cells if isinstance(values, list | tuple) else cells[0]

    def _bound(self, target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {argument.name: value for argument, value in zip(target._schema.arguments, args, strict=False)}
        given.update(kwargs)
        return {name: self._value(value) for name, value in given.items()}

    def _in_place(
        self,
        node: fx.Node,
        target: torch._ops.OpOverload,
        written: str,
        bound: dict[str, Any],
        out: tuple[TensorType, ...],
    ) -> None:
        cell = bound[written]
        if cell.root.sealed_by is not None:
            raise CannotFold(cell.root.sealed_by, "its result is a view that is written to")
        if target._opname == "detach_":
            if self.builder.type_of(cell.read()).requires_grad:
                cell.write(self.builder.op("aten.detach.default", (cell.read(),), out))
            self._env[node] = cell
            return
        operands = {name: read_all(value) for name, value in bound.items()}
        old = self.builder.type_of(cell.read())
        if out[0].shape != old.shape and cell.base is not None:
            raise UnsupportedModel(
                f"{target} changes the shape of a view in place", where=self.builder.source, fix="write it out of place"
            )
        new = append_functional(
            self.builder, target, operands, replace(old, shape=out[0].shape), autocast=self.autocast
        )
        cell.write(new)
        self._env[node] = cell

    # Views

    def _view_or_new(
        self,
        target: torch._ops.OpOverload,
        bound: dict[str, Any],
        ref: Ref,
        value: torch.Tensor,
        index: int,
        out: tuple[TensorType, ...],
    ) -> Cell:
        key, source = next(((name, arg) for name, arg in bound.items() if isinstance(arg, Cell)), ("", None))
        first = self._storages.get(_storage(value))
        if source is None or first is None or source.root is not first.root:
            return self._cell(ref, value)
        if ref == source.read():
            return Cell(ref, base=source, view=_same, unview=_replaced, seen_version=source.version)
        arguments = {name: arg for name, arg in bound.items() if name != key}
        where = self.builder.source

        def view(base: Ref) -> Ref:
            operands = {key: base, **{name: read_all(arg) for name, arg in arguments.items()}}
            return append(self.builder, target, operands, out, autocast=self.autocast)[index]

        def unview(base: Ref, new: Ref) -> Ref:
            return unview_of(self.builder, target, base, new, arguments, index=index, where=where)

        return Cell(ref, base=source, view=view, unview=unview, seen_version=source.version)


def _same(base: Ref) -> Ref:
    return base


def _replaced(base: Ref, new: Ref) -> Ref:
    return new


def _flat(arg: Any) -> tuple[Any, ...]:
    return tuple(arg) if isinstance(arg, list | tuple) else (arg,)


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _is_effectless(target: torch._ops.OpOverload) -> bool:
    return target._opname.startswith(("_assert", "sym_constrain"))


def _calls(node: fx.Node) -> tuple[ModuleCall, ...]:
    found = []
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        path = path.split("@")[0]
        if not path:
            continue
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        fqn = "" if path + "." == _PREFIX else path.removeprefix(_PREFIX)
        found.append(ModuleCall(key, fqn, name))
    return tuple(found)
