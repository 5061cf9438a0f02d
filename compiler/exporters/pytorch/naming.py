"""Variable names for the values of a template: the user's own, read from the source lines, or the modules'."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from ....planner.capture.graph import Kind, Node, Ref, Template
from ...text import assigned_names, identifier

VIEWS = ("reshape", "view", "transpose", "permute", "unsqueeze", "squeeze", "expand", "t", "clone", "_to_copy", "to")
# Operations that make something new of their operand: named after the module that runs them.
PRODUCERS = (
    "linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "rms_norm", "group_norm", "batch_norm", "matmul",
    "scaled_dot_product_attention", "cross_entropy_loss", "mse_loss", "nll_loss_nd",
)  # fmt: skip
BUILTINS = frozenset(dir(builtins))


def value_names(template: Template) -> dict[Ref, str]:
    """A name for every value; not unique, the writer sees to that."""
    given: dict[Ref, str] = {}
    if template.outputs and template.type_of(template.outputs[0]).requires_grad:
        given[template.outputs[0]] = "x"
    given.update(_user_names(template))
    names: dict[Ref, str] = {}
    stems: dict[Ref, str] = {}  # what values computed from this one are called
    for node in template.nodes:
        is_input = node.kind is Kind.INPUT
        stem = identifier(node.name.rpartition(".")[2], "x") if is_input else _fallback(template, node, stems)
        for index in range(len(node.outputs)):
            ref = Ref(node.name, index)
            names[ref] = given.get(ref) or (stem if len(node.outputs) == 1 else f"{stem}_{index + 1}")
            stems[ref] = given.get(ref) or stem
    return {ref: f"{name}_" if name in BUILTINS else name for ref, name in names.items()}


def _fallback(template: Template, node: Node, stems: Mapping[Ref, str]) -> str:
    """The module that made the value; for what is computed from it further on, the name of what it is computed from."""
    if node.kind is not Kind.OP:
        return identifier("_".join(node.name.split(".")[-2:]))
    parts = [part for part in node.module.split(".") if part and not part.isdigit()]
    operation = node.op.split(".")[1] if node.op.count(".") > 1 else node.op
    if node.operands and operation not in PRODUCERS and (operation in VIEWS or node.output.requires_grad):
        return stems[node.operands[0]]
    if parts:
        return identifier(parts[-1])
    if operation.endswith("_loss"):
        return "loss"
    if operation == "sum":
        return "count" if template.type_of(node.operands[0]).dtype == "bool" else "total"
    unit = template.pattern.rpartition(".")[2]
    return unit if operation in PRODUCERS and _is_variable(unit) else identifier(operation.lstrip("_"))


def _is_variable(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def _user_names(template: Template) -> Iterator[tuple[Ref, str]]:
    """`q, k, v = f(x)` names the values that leave this line, in order, if there are as many as it assigns."""
    operations = [node for node in template.nodes if node.kind is Kind.OP]
    readers = template.consumers()
    groups = [(source, list(group)) for source, group in groupby(operations, key=lambda node: node.source)]
    # `x = x + self.attn(self.ln_1(x))` comes up twice, around the operations of attn: x is what it ends with.
    ends = {source: group[-1].module for source, group in groups}
    for source, group in groups:
        if group[-1].module != ends[source]:
            continue
        code = source.partition(": ")[2]
        names = assigned_names(code)
        if names and not _is_inner_call(code, template.pattern.rpartition(".")[2]):
            leaving = _leaving(template, group, readers)
            if len(leaving) == len(names):
                for ref, name in zip(leaving, names, strict=True):
                    yield from ((made, identifier(name)) for made in _viewed(template, ref, group))


def _viewed(template: Template, ref: Ref, group: Sequence[Node]) -> Iterator[Ref]:
    """The value and what it is a view of, as far as the same line makes it."""
    inside = {node.name for node in group}
    while ref.node in inside:
        yield ref
        node = template.by_name[ref.node]
        if node.op.split(".")[1] not in VIEWS:
            return
        ref = node.operands[0]


def _is_inner_call(code: str, module: str) -> bool:
    """Whether `module` is called within the line, so that what it returns is not what the line assigns."""
    if not module.isidentifier() or f"{module}(" not in code:
        return False
    return re.match(rf"[\w, ]+=\s*[\w.]*\b{module}\(", code.strip()) is None


def _leaving(template: Template, group: Sequence[Node], readers: dict[Ref, list[tuple[str, int]]]) -> list[Ref]:
    inside = {node.name for node in group}
    found: list[Ref] = []
    for node in group:
        for index in range(len(node.outputs)):
            ref = Ref(node.name, index)
            if ref in template.outputs or any(name not in inside for name, _ in readers.get(ref, [])):
                found.append(ref)
    return found
