"""Flat graph -> ModelGraph: the prelude is split off, segments become units, equal units share one template.

Two units are equal when their operations, arguments, constants, types, relative names and trained tensors are equal, so
a block that differs in anything at all has a template of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import UnsupportedModel
from .flat import FlatGraph, FlatNode, live_nodes
from .graph import Arg, Kind, ModelGraph, Node, ParameterInfo, Ref, Template, Unit, Value
from .naming import Names, camel, pattern_of, relative
from .random_ops import is_random
from .segments import Segment, segments

_TENSORS = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)
_UPDATES_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")


@dataclass(slots=True)
class _Draft:
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

    def key(self) -> Hashable:
        call = self.segment.call if self.segment is not None else None
        return (
            self.is_module,
            call.class_path if self.is_module and call is not None else "",
            tuple((n.name, n.kind, n.outputs, n.op, n.args, n.kwargs, n.module, n.constant) for n in self.nodes),
            tuple(self.local[ref] for ref in self.outputs),
            tuple(self.updates),
        )


def fold(
    flat: FlatGraph,
    *,
    name: str,
    batch_size: int,
    tensors: Mapping[str, ParameterInfo],
    notes: Sequence[str] = (),
) -> ModelGraph:
    """Fold a flat graph.

    Raises:
        UnsupportedModel: the loss depends on no trained parameter.
    """
    by_name = {node.name: node for node in flat.nodes}
    live = live_nodes(flat, with_buffers=True)
    if not by_name[flat.loss.node].outputs[flat.loss.index].requires_grad:
        raise UnsupportedModel("the loss depends on no parameter that requires a gradient", fix="train something")
    prelude, same = _prelude_nodes(flat, live, by_name)
    live = tuple(_renamed(node, same) for node in live)
    in_prelude = {node.name for node in prelude}
    rest = [node for node in live if node.kind is Kind.OP and node.name not in in_prelude and node.name not in same]
    cut = segments(rest, by_name)
    home = {node.name: index + 1 for index, segment in enumerate(cut) for node in segment.nodes}
    used_by_others = {
        ref
        for index, segment in enumerate(cut)
        for node in segment.nodes
        for ref in node.operands
        if home.get(ref.node, 0) != index + 1 and by_name[ref.node].kind not in _TENSORS
    } | {flat.loss}
    first = _draft_prelude(flat, prelude, used_by_others, by_name, same)
    drafts = [first]
    for index, segment in enumerate(cut):
        draft = _draft_unit(segment, tensors, by_name, in_prelude)
        draft.outputs = [ref for node in segment.nodes for ref in _outputs(node) if ref in used_by_others]
        for fqn, ref in sorted(flat.buffer_updates.items()):
            if home.get(ref.node) == index + 1:
                draft.updates.append((_tensor(draft, by_name, fqn, tensors), draft.local[ref]))
        drafts.append(draft)
    return _assembled(flat, drafts, name, batch_size, tensors, live, tuple(notes))


def _prelude_nodes(
    flat: FlatGraph, live: Sequence[FlatNode], by_name: Mapping[str, FlatNode]
) -> tuple[list[FlatNode], dict[str, str]]:
    """Operations that need no parameter, gradient or random number, each once; and name -> name of its equal."""
    moving = set(flat.buffer_updates)
    for node in live:
        if node.op in _UPDATES_STATISTICS:
            moving |= {by_name[ref.node].fqn for ref in node.operands if by_name[ref.node].kind is Kind.BUFFER}
    ready = {
        node.name
        for node in live
        if node.kind in (Kind.INPUT, Kind.CONSTANT) or (node.kind is Kind.BUFFER and node.fqn not in moving)
    }
    found: list[FlatNode] = []
    same: dict[str, str] = {}
    seen: dict[Hashable, str] = {}
    for node in live:
        if node.kind is not Kind.OP or is_random(node.op, node.args, node.kwargs) or node.op in _UPDATES_STATISTICS:
            continue
        if not all(ref.node in ready for ref in node.operands):
            continue
        node = _renamed(node, same)
        ready.add(node.name)
        key = (node.op, node.args, node.kwargs, repr(node.args))  # repr: 1, 1.0 and True are equal
        if key in seen:
            same[node.name] = seen[key]
        else:
            seen[key] = node.name
            found.append(node)
    return found, same


def _renamed(node: FlatNode, same: Mapping[str, str]) -> FlatNode:
    if not any(ref.node in same for ref in node.operands):
        return node
    return replace(
        node,
        args=tuple(_mapped(arg, same) for arg in node.args),
        kwargs=tuple((key, _mapped(arg, same)) for key, arg in node.kwargs),
    )


def _mapped(arg: Arg, same: Mapping[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(same.get(arg.node, arg.node), arg.index)
    return tuple(_mapped(item, same) for item in arg) if isinstance(arg, tuple) else arg


def _outputs(node: FlatNode) -> list[Ref]:
    return [Ref(node.name, index) for index in range(len(node.outputs))]


# Drafts


def _draft_prelude(
    flat: FlatGraph,
    nodes: Sequence[FlatNode],
    used: set[Ref],
    by_name: Mapping[str, FlatNode],
    same: Mapping[str, str],
) -> _Draft:
    draft = _Draft(segment=None)
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
            draft.updates.append((_tensor(draft, by_name, fqn, {}), draft.local[ref]))
    draft.outputs = [Ref(i.name) for i in flat.inputs if Ref(i.name) in used]
    draft.outputs += [ref for node in nodes for ref in _outputs(node) if ref in used]
    return draft


def _draft_unit(
    segment: Segment, tensors: Mapping[str, ParameterInfo], by_name: Mapping[str, FlatNode], in_prelude: set[str]
) -> _Draft:
    draft = _Draft(segment=segment)
    own = {node.name for node in segment.nodes}
    outside: dict[Ref, str] = {}
    for node in segment.nodes:
        for ref in node.operands:
            kind = by_name[ref.node].kind
            if ref.node not in own and kind not in _TENSORS and ref not in outside:
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
    draft: _Draft, node: FlatNode, by_name: Mapping[str, FlatNode], tensors: Mapping[str, ParameterInfo]
) -> None:
    for ref in node.operands:
        operand = by_name[ref.node]
        if operand.kind in _TENSORS and ref not in draft.local:
            if operand.kind is Kind.CONSTANT:
                local = draft.names.unique("constant")
                draft.nodes.append(
                    Node(name=local, kind=Kind.CONSTANT, outputs=operand.outputs, constant=operand.constant)
                )
                draft.local[ref] = Ref(local)
            else:
                _tensor(draft, by_name, operand.fqn, tensors)
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
    for ref in _outputs(node):
        draft.local[ref] = Ref(local, ref.index)


def _tensor(draft: _Draft, by_name: Mapping[str, FlatNode], fqn: str, tensors: Mapping[str, ParameterInfo]) -> str:
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


# Assembly


def _assembled(
    flat: FlatGraph,
    drafts: Sequence[_Draft],
    name: str,
    batch_size: int,
    tensors: Mapping[str, ParameterInfo],
    live: Sequence[FlatNode],
    notes: tuple[str, ...],
) -> ModelGraph:
    values: dict[Ref, Value] = {}
    for unit, draft in enumerate(drafts):
        for index, ref in enumerate(draft.outputs):
            values[ref] = Value(unit, index)
    groups: dict[Hashable, list[int]] = {}
    for unit, draft in enumerate(drafts):
        groups.setdefault(("prelude",) if unit == 0 else draft.key(), []).append(unit)
    names, patterns = Names(separator=""), Names(separator="#")
    templates: list[Template] = []
    template_of: dict[int, int] = {}
    for members in groups.values():
        draft = drafts[members[0]]
        taken = names.unique(_template_name(draft))
        fqns = [drafts[member].fqn for member in members]
        pattern = "" if members == [0] else patterns.unique(pattern_of(fqns) or f"<{taken}>")
        for member in members:
            template_of[member] = len(templates)
        templates.append(_template(draft, taken, pattern, drafts))
    units = tuple(
        Unit(
            template=template_of[unit],
            fqn=draft.fqn,
            inputs=tuple(values[ref] for ref in draft.inputs),
            tensors=tuple(draft.tensors),
        )
        for unit, draft in enumerate(drafts)
    )
    return ModelGraph(
        name=name,
        batch_size=batch_size,
        inputs=flat.inputs,
        templates=_without_shared_insides(templates, units),
        units=units,
        loss=values[flat.loss],
        tensors=tensors,
        is_random=any(is_random(node.op, node.args, node.kwargs) for node in live if node.kind is Kind.OP),
        notes=notes,
    )


def _without_shared_insides(templates: Sequence[Template], units: Sequence[Unit]) -> tuple[Template, ...]:
    """No module of its own where others read a tensor inside it: they would need it when its module does not run."""
    inside: dict[str, set[int]] = {}
    for unit in units:
        if templates[unit.template].is_module:
            inside.setdefault(unit.fqn, set()).add(unit.template)
    opened: set[int] = set()
    for unit in units:
        for _, tensor in unit.tensors:
            above = tensor
            while "." in above:
                above = above.rpartition(".")[0]
                if above != unit.fqn:
                    opened |= inside.get(above, set())
    return tuple(replace(t, is_module=False) if index in opened else t for index, t in enumerate(templates))


def _template_name(draft: _Draft) -> str:
    if draft.segment is None:
        return "Prelude"
    call = draft.segment.call
    if call is None:
        return camel(draft.segment.nodes[0].op.split(".")[1])
    if draft.is_module:
        return call.class_name
    last = call.fqn.rsplit(".", 1)[-1]
    return call.class_name if last.isdigit() or not last else camel(last)


def _template(draft: _Draft, name: str, pattern: str, drafts: Sequence[_Draft]) -> Template:
    """The template of a draft, its INPUT nodes first and under readable names."""
    rename = _input_names(draft, drafts[0])
    nodes = sorted(draft.nodes, key=lambda node: (node.kind is not Kind.INPUT, node.kind is Kind.OP))

    def renamed(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(rename.get(arg.node, arg.node), arg.index)
        return tuple(renamed(item) for item in arg) if isinstance(arg, tuple) else arg

    def ref_of(ref: Ref) -> Ref:
        return Ref(rename.get(ref.node, ref.node), ref.index)

    return Template(
        name=name,
        pattern=pattern,
        nodes=tuple(
            replace(
                node,
                name=rename.get(node.name, node.name),
                args=tuple(renamed(arg) for arg in node.args),
                kwargs=tuple((key, renamed(arg)) for key, arg in node.kwargs),
            )
            for node in nodes
        ),
        outputs=tuple(ref_of(draft.local[ref]) for ref in draft.outputs),
        is_module=draft.is_module,
        buffer_updates=tuple((buffer, ref_of(ref)) for buffer, ref in draft.updates),
    )


def _input_names(draft: _Draft, prelude: _Draft) -> dict[str, str]:
    names = Names()
    for node in draft.nodes:
        if node.kind is not Kind.INPUT:
            names.unique(node.name)
    found = {}
    for ref in draft.inputs:
        local = prelude.local.get(ref)
        wanted = local.node.rsplit(".", 1)[-1] if local is not None else "x"
        found[draft.local[ref].node] = names.unique(wanted)
    return found
