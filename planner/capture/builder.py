"""Appends canonical nodes one by one, propagating `requires_grad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .flat import FlatNode, ModuleCall
from .graph import Arg, Kind, Ref, Symbol, TensorType, refs_of

# These give a fresh value, whatever their operand is.
_WITHOUT_GRADIENT = ("detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like")
_DIFFERENTIABLE = ("float", "bfloat", "complex")


@dataclass(slots=True)
class Builder:
    """The nodes so far. `calls`, `source` and `grad_enabled` hold for the node that is being translated."""

    nodes: list[FlatNode] = field(default_factory=list)
    by_name: dict[str, FlatNode] = field(default_factory=dict)
    calls: tuple[ModuleCall, ...] = ()
    source: str = ""
    grad_enabled: bool = True
    detached: dict[Ref, Ref] = field(default_factory=dict)  # value -> what regions without gradient read of it
    _counts: dict[str, int] = field(default_factory=dict)

    def type_of(self, ref: Ref) -> TensorType:
        return self.by_name[ref.node].outputs[ref.index]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return self.type_of(ref).shape

    def leaf(self, kind: Kind, name: str, value: TensorType, *, fqn: str = "", constant: object = None) -> Ref:
        """Add an input, parameter, buffer or constant."""
        return self._append(FlatNode(name=name, kind=kind, outputs=(value,), fqn=fqn, constant=constant))

    def op(
        self,
        op: str,
        args: Sequence[Arg],
        out: TensorType | Sequence[TensorType],
        kwargs: Sequence[tuple[str, Arg]] = (),
    ) -> Ref:
        """Add an operation and return its first output; `out` gives shapes and dtypes, gradients are propagated."""
        outputs = (out,) if isinstance(out, TensorType) else tuple(out)
        args, keywords = tuple(_tuples(arg) for arg in args), tuple(kwargs)
        name = op.split(".")[1]
        if not self.grad_enabled and name != "detach":
            args = tuple(self._without_gradient(arg) for arg in args)
            keywords = tuple((key, self._without_gradient(arg)) for key, arg in keywords)
        flows = any(self.type_of(ref).requires_grad for ref in refs_of((*args, *(v for _, v in keywords))))
        flows = flows and name not in _WITHOUT_GRADIENT and not name.startswith("new_")
        typed = tuple(
            replace(value, requires_grad=flows and value.dtype.startswith(_DIFFERENTIABLE)) for value in outputs
        )
        return self._append(
            FlatNode(
                name=name, kind=Kind.OP, outputs=typed, op=op, args=args, kwargs=keywords, calls=self.calls,
                source=self.source,
            )
        )  # fmt: skip

    def copy(
        self,
        node: FlatNode,
        *,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        calls: tuple[ModuleCall, ...],
    ) -> Ref:
        """Append an operation of a repeated block with other operands; its types are what they are there."""
        return self._append(
            FlatNode(
                name=node.op.split(".")[1], kind=Kind.OP, outputs=node.outputs, op=node.op, args=args, kwargs=kwargs,
                calls=calls, source=node.source,
            )
        )  # fmt: skip

    def _append(self, node: FlatNode) -> Ref:
        count = self._counts.get(node.name, 0)
        self._counts[node.name] = count + 1
        if count or node.name in self.by_name:
            node = replace(node, name=f"{node.name}.{count}")
        self.nodes.append(node)
        self.by_name[node.name] = node
        return Ref(node.name)

    def outputs(self, ref: Ref) -> tuple[Ref, ...]:
        """Every output of the node of `ref`."""
        return tuple(Ref(ref.node, index) for index in range(len(self.by_name[ref.node].outputs)))

    def _without_gradient(self, arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(self._without_gradient(item) for item in arg)
        if not isinstance(arg, Ref) or not self.type_of(arg).requires_grad:
            return arg
        if arg not in self.detached:
            self.detached[arg] = self.op("aten.detach.default", (arg,), self.type_of(arg))
        return self.detached[arg]

    def reshape(self, ref: Ref, shape: Sequence[int]) -> Ref:
        """`ref` in this shape; nothing is added where it has it already."""
        value = self.type_of(ref)
        if value.shape == tuple(shape):
            return ref
        return self.op("aten.reshape.default", (ref, tuple(shape)), TensorType(shape=tuple(shape), dtype=value.dtype))

    def cast(self, ref: Ref, dtype: str) -> Ref:
        """`ref` in this dtype."""
        value = self.type_of(ref)
        if value.dtype == dtype:
            return ref
        return self.op("aten.to.dtype", (ref, Symbol("dtype", dtype)), TensorType(shape=value.shape, dtype=dtype))

    def expand(self, ref: Ref, shape: Sequence[int]) -> Ref:
        value = self.type_of(ref)
        if value.shape == tuple(shape):
            return ref
        return self.op("aten.expand.default", (ref, tuple(shape)), TensorType(shape=tuple(shape), dtype=value.dtype))


def _tuples(arg: Arg) -> Arg:
    return tuple(_tuples(item) for item in arg) if isinstance(arg, list | tuple) else arg
