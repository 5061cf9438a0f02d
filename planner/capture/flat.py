"""The canonical graph before folding: every operation of a step in order, with the module calls it lies in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .graph import Arg, Kind, ModelInput, Ref, TensorType, refs_of


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module; `key` tells several calls of the same module apart."""

    key: str
    fqn: str
    class_path: str  # "torch.nn.modules.linear.Linear"

    @property
    def class_name(self) -> str:
        return self.class_path.rsplit(".", 1)[-1]

    @property
    def is_torch(self) -> bool:
        return self.class_path.startswith("torch.nn.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatNode:
    """One value producer. `calls`: the module calls around it, outermost first; `fqn`: of a parameter or buffer."""

    name: str
    kind: Kind
    outputs: tuple[TensorType, ...]
    op: str = ""
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    calls: tuple[ModuleCall, ...] = ()
    source: str = ""
    fqn: str = ""
    constant: object = None
    operands: tuple[Ref, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        operands = tuple(refs_of((*self.args, *(value for _, value in self.kwargs))))
        object.__setattr__(self, "operands", operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatGraph:
    """A step in topological order. `buffer_updates`: buffer FQN -> value after the step (without batch norm's)."""

    nodes: tuple[FlatNode, ...]
    inputs: tuple[ModelInput, ...]
    loss: Ref
    buffer_updates: Mapping[str, Ref]


def live_nodes(graph: FlatGraph, *, with_buffers: bool) -> tuple[FlatNode, ...]:
    """The nodes that the loss needs, and with `with_buffers` those that the buffer updates need."""
    by_name = {node.name: node for node in graph.nodes}
    pending = [graph.loss.node, *(ref.node for ref in graph.buffer_updates.values() if with_buffers)]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending.extend(ref.node for ref in by_name[name].operands)
    if with_buffers:
        for node in graph.nodes:  # running statistics move although the loss may not need the normalised value
            if node.op == "aten.batch_norm.default" and node.name not in found:
                pending = [node.name]
                while pending:
                    name = pending.pop()
                    if name not in found:
                        found.add(name)
                        pending.extend(ref.node for ref in by_name[name].operands)
    return tuple(node for node in graph.nodes if node.name in found)
