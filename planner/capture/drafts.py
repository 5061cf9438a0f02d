"""Units under construction: nodes of the flat graph under names of their own, and what they stand for."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from .flat import FlatGraph, FlatNode
from .graph import Arg, Kind, Node, ParameterInfo, Ref
from .naming import Names, relative
from .segments import Segment

TENSORS = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


@dataclass(slots=True)
class Draft:
    """A unit under construction: template nodes under local names, and what they stand for."""

    segment: Segment | None
    nodes: list[Node] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    local: dict[Ref, Ref] = field(default_factory=dict)  # flat ref -> ref in the template
    inputs: list[Ref] = field(default_factory=list)  # flat refs, aligned with the INPUT nodes
    tensors: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)  # flat refs
    updates: list[tuple[str, Ref]] = field(default_factory=list)

    @property
    def fqn(self) -> str:
        return self.segment.call.fqn if self.segment is not None and self.segment.call is not None else ""

    @property
    def is_module(self) -> bool:
        segment = self.segment
        if segment is None or segment.call is None:
            return False
        whole = all(segment.call in node.calls for node in segment.nodes)
        return segment.is_block or (whole and not segment.call.is_torch and len(segment.nodes) > 1)

    @property
    def _owned(self) -> tuple[bool, ...]:
        """Of each tensor, whether the call's module holds it; else one that comes before does, which it is tied to."""
        return tuple(relative(fqn, self.fqn) is not None for _, fqn in self.tensors)

    def key(self) -> Hashable:
        call = self.segment.call if self.segment is not None else None
        return (
            self.is_module,
            call.class_path if self.is_module and call is not None else "",
            self._owned if self.is_module else (),
            tuple((n.name, n.kind, n.outputs, n.op, n.args, n.kwargs, n.module, n.constant) for n in self.nodes),
            tuple(self.local[ref] for ref in self.outputs),
            tuple(self.updates),
        )


def outputs_of(node: FlatNode) -> list[Ref]:
    return [Ref(node.name, index) for index in range(len(node.outputs))]


def draft_prelude(
    flat: FlatGraph,
    nodes: Sequence[FlatNode],
    used: set[Ref],
    by_name: Mapping[str, FlatNode],
    same: Mapping[str, str],
) -> Draft:
    """What runs before the units: every model input, and the `nodes` that are used."""
    draft = Draft(segment=None)
    for item in flat.inputs:
        ref = Ref(item.name)
        local = draft.names.unique(item.name)
        draft.nodes.append(Node(name=local, kind=Kind.INPUT, outputs=(item.type,)))
        draft.local[ref] = Ref(local)
    wanted = {ref.node for ref in used} | {same.get(r.node, r.node) for r in flat.buffer_updates.values()}
    for node in reversed(nodes):
        if node.name in wanted:
            wanted |= {ref.node for ref in node.operands}
    for node in nodes:
        if node.name in wanted:
            _add_operation(draft, node, by_name, {})
    for fqn, ref in sorted(flat.buffer_updates.items()):
        ref = Ref(same.get(ref.node, ref.node), ref.index)
        if ref in draft.local:
            draft.updates.append((add_tensor(draft, by_name, fqn, {}), draft.local[ref]))
    draft.outputs = [Ref(i.name) for i in flat.inputs if Ref(i.name) in used]
    draft.outputs += [ref for node in nodes for ref in outputs_of(node) if ref in used]
    return draft


def draft_unit(
    segment: Segment, tensors: Mapping[str, ParameterInfo], by_name: Mapping[str, FlatNode], in_prelude: set[str]
) -> Draft:
    """A unit without its outputs and buffer updates, which depend on the others."""
    draft = Draft(segment=segment)
    own = {node.name for node in segment.nodes}
    outside: dict[Ref, str] = {}
    for node in segment.nodes:
        for ref in node.operands:
            kind = by_name[ref.node].kind
            if ref.node not in own and kind not in TENSORS and ref not in outside:
                comes_from_prelude = ref.node in in_prelude or kind is Kind.INPUT
                outside[ref] = ref.node.replace(".", "_") if comes_from_prelude else "x"
    for ref in outside:
        local = draft.names.unique(f"input_{len(draft.inputs)}")
        draft.nodes.append(Node(name=local, kind=Kind.INPUT, outputs=(by_name[ref.node].outputs[ref.index],)))
        draft.local[ref] = Ref(local)
        draft.inputs.append(ref)
    for node in segment.nodes:
        _add_operation(draft, node, by_name, tensors)
    return draft


def _add_operation(
    draft: Draft, node: FlatNode, by_name: Mapping[str, FlatNode], tensors: Mapping[str, ParameterInfo]
) -> None:
    for ref in node.operands:
        operand = by_name[ref.node]
        if operand.kind in TENSORS and ref not in draft.local:
            if operand.kind is Kind.CONSTANT:
                local = draft.names.unique("constant")
                draft.nodes.append(
                    Node(name=local, kind=Kind.CONSTANT, outputs=operand.outputs, constant=operand.constant)
                )
                draft.local[ref] = Ref(local)
            else:
                add_tensor(draft, by_name, operand.fqn, tensors)
    path = node.calls[-1].fqn if node.calls else ""
    module = path if draft.segment is None else relative(path, draft.fqn) or ""
    operation = node.op.split(".")[1].strip("_")
    local = draft.names.unique(f"{module}.{operation}" if module else operation)
    draft.nodes.append(
        Node(
            name=local, kind=Kind.OP, outputs=node.outputs, op=node.op,
            args=tuple(_localised(arg, draft.local) for arg in node.args),
            kwargs=tuple((key, _localised(arg, draft.local)) for key, arg in node.kwargs),
            module=module, source=node.source,
        )
    )  # fmt: skip
    for ref in outputs_of(node):
        draft.local[ref] = Ref(local, ref.index)


def add_tensor(draft: Draft, by_name: Mapping[str, FlatNode], fqn: str, tensors: Mapping[str, ParameterInfo]) -> str:
    """The local name of a parameter or buffer, added where it is not there yet."""
    flat = Ref(fqn)
    if flat in draft.local:
        return draft.local[flat].node
    node = by_name[fqn]
    known = tensors.get(fqn)
    inside = [relative(alias, draft.fqn) for alias in (fqn, *(known.aliases if known else ()))]
    if draft.segment is None:
        wanted = fqn
    else:
        words = [part for part in fqn.split(".") if not part.isdigit()]
        wanted = next((path for path in inside if path), None) if draft.fqn else None
        wanted = wanted or (words[-1] if words else "tensor")
    local = draft.names.unique(wanted)
    draft.nodes.append(Node(name=local, kind=node.kind, outputs=node.outputs))
    draft.local[flat] = Ref(local)
    draft.tensors.append((local, fqn))
    return local


def _localised(arg: Arg, local: Mapping[Ref, Ref]) -> Arg:
    if isinstance(arg, Ref):
        return local[arg]
    return tuple(_localised(item, local) for item in arg) if isinstance(arg, tuple) else arg
