"""Flat graph -> ModelGraph: the prelude is split off, segments become units, equal units share one template.

Two units are equal when their operations, arguments, constants, types, relative names and trained tensors are equal, so
a block that differs in anything at all has a template of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from ..errors import UnsupportedModel
from .drafts import TENSORS, Draft, add_tensor, draft_prelude, draft_unit, outputs_of
from .flat import FlatGraph, FlatNode, live_nodes
from .graph import Arg, Kind, ModelGraph, Node, ParameterInfo, Ref, Template, Unit, Value, without_gradient
from .naming import Names, camel, pattern_of
from .random_ops import is_random
from .segments import segments

_EMPTY = "aten.empty.memory_format"
_UPDATES_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")


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
        raise UnsupportedModel(
            "the loss depends on no parameter that requires a gradient",
            where=name,
            fix="give the model parameters to train, with requires_grad, and use them in forward",
        )
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
        if home.get(ref.node, 0) != index + 1 and by_name[ref.node].kind not in TENSORS
    } | {flat.loss}
    first = draft_prelude(flat, prelude, used_by_others, by_name, same)
    drafts = [first]
    for index, segment in enumerate(cut):
        draft = draft_unit(segment, tensors, by_name, in_prelude)
        draft.outputs = [ref for node in segment.nodes for ref in outputs_of(node) if ref in used_by_others]
        for fqn, ref in sorted(flat.buffer_updates.items()):
            if home.get(ref.node) == index + 1:
                draft.updates.append((add_tensor(draft, by_name, fqn, tensors), draft.local[ref]))
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
    random = [node for node in live if node.kind is Kind.OP and is_random(node.op, node.args, node.kwargs)]
    # A draw and the memory that it fills stay together.
    others = {node.name for node in random}
    others |= {ref.node for node in random for ref in node.operands if by_name[ref.node].op == _EMPTY}
    found: list[FlatNode] = []
    same: dict[str, str] = {}
    seen: dict[Hashable, str] = {}
    for node in live:
        if node.kind is not Kind.OP or node.name in others or node.op in _UPDATES_STATISTICS:
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


def _assembled(
    flat: FlatGraph,
    drafts: Sequence[Draft],
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
        templates=_with_true_modules(templates, units),
        units=units,
        loss=values[flat.loss],
        tensors=tensors,
        is_random=any(is_random(node.op, node.args, node.kwargs) for node in live if node.kind is Kind.OP),
        notes=notes,
    )


def _with_true_modules(templates: Sequence[Template], units: Sequence[Unit]) -> tuple[Template, ...]:
    """No module of its own where it is the whole model, where its calls compute different things, or where others read
    a tensor inside it: they would need it when its module does not run."""
    inside: dict[str, set[int]] = {}
    for unit in units:
        if templates[unit.template].is_module:
            inside.setdefault(unit.fqn, set()).add(unit.template)
    opened = {template for fqn, alike in inside.items() if not fqn or len(alike) > 1 for template in alike}
    for unit in units:
        for _, tensor in unit.tensors:
            above = tensor
            while "." in above:
                above = above.rpartition(".")[0]
                if above != unit.fqn:
                    opened |= inside.get(above, set())
    return tuple(replace(t, is_module=False) if index in opened else t for index, t in enumerate(templates))


def _template_name(draft: Draft) -> str:
    if draft.segment is None:
        return "Prelude"
    call = draft.segment.call
    if call is None:
        return camel(draft.segment.nodes[0].op.split(".")[1])
    if draft.is_module:
        return call.class_name
    last = call.fqn.rsplit(".", 1)[-1]
    return call.class_name if last.isdigit() or not last else camel(last)


def _template(draft: Draft, name: str, pattern: str, drafts: Sequence[Draft]) -> Template:
    """The template of a draft, its INPUT nodes first and under readable names."""
    rename = _input_names(draft, drafts[0])
    nodes = sorted(draft.nodes, key=lambda node: (node.kind is not Kind.INPUT, node.kind is Kind.OP))

    def renamed(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return Ref(rename.get(arg.node, arg.node), arg.index)
        return tuple(renamed(item) for item in arg) if isinstance(arg, tuple) else arg

    def ref_of(ref: Ref) -> Ref:
        return Ref(rename.get(ref.node, ref.node), ref.index)

    return _with_gradients_that_arrive(
        Template(
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
    )


def _with_gradients_that_arrive(template: Template) -> Template:
    """Values without gradient where all who read them send none: `detach`, `argmax`, comparisons."""
    sent = {template.by_name[name].operands[position] for name, position in template.differentiated}
    reached = sent.union(template.outputs)

    def arriving(node: Node) -> Node:
        outputs = enumerate(node.outputs)
        made = tuple(v if Ref(node.name, i) in reached else without_gradient(v) for i, v in outputs)
        return node if made == node.outputs or node.kind is Kind.PARAMETER else replace(node, outputs=made)

    return replace(template, nodes=tuple(map(arriving, template.nodes)))


def _input_names(draft: Draft, prelude: Draft) -> dict[str, str]:
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
