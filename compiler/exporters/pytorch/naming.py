"""Variable names for the values of a template: the user's own, read from the source line of each operation, else the module's."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from itertools import groupby

from ....planner.capture.graph import Kind, Node, Ref, Template
from ...source import assigned_names, identifier


BUILTINS = frozenset(dir(builtins))


def value_names(template: Template) -> dict[Ref, str]:
    """A name for every value; not unique, the writer sees to that."""
    names: dict[Ref, str] = {}
    for node in template.nodes:
        for index in range(len(node.outputs)):
            names[Ref(node.name, index)] = _fallback(node)
    for node in template.of_kind(Kind.INPUT):
        names[Ref(node.name)] = identifier(node.name.rpartition(".")[2], "x")
    if template.outputs and template.type_of(template.outputs[0]).requires_grad:
        names[template.outputs[0]] = "x"
    names.update(_user_names(template))
    return {ref: "total" if name == "sum" else f"{name}_" if name in BUILTINS else name for ref, name in names.items()}


def _fallback(node: Node) -> str:
    """The module that made the value, or the operation where no module did."""
    if node.kind is not Kind.OP:
        return identifier("_".join(node.name.split(".")[-2:]))
    parts = [part for part in node.module.split(".") if part and not part.isdigit()]
    operation = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
    return identifier(parts[-1] if parts else operation.lstrip("_"))


def _user_names(template: Template) -> Iterator[tuple[Ref, str]]:
    """`q, k, v = f(x)` names the values that leave this line, in order, if there are as many as it assigns."""
    operations = [node for node in template.nodes if node.kind is Kind.OP]
    readers = template.consumers()
    for source, group in groupby(operations, key=lambda node: node.source):
        names = assigned_names(source.partition(": ")[2])
        if names:
            leaving = _leaving(template, list(group), readers)
            if len(leaving) == len(names):
                yield from ((ref, identifier(name)) for ref, name in zip(leaving, names, strict=True))


def _leaving(template: Template, group: Sequence[Node], readers: dict[Ref, list[tuple[str, int]]]) -> list[Ref]:
    inside = {node.name for node in group}
    found: list[Ref] = []
    for node in group:
        for index in range(len(node.outputs)):
            ref = Ref(node.name, index)
            if ref in template.outputs or any(name not in inside for name, _ in readers.get(ref, [])):
                found.append(ref)
    return found
