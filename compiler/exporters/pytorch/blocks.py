"""Classes as text: the one of a distinct block, and the parts that every class has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ....planner.capture.graph import Kind, Ref
from ....planner.sharding.program import TemplateProgram, Var
from ...held import HeldTensor
from ...source import Body, Expr
from ...text import comment, layout, literal, quote
from .body import Scope, forward_pair, statements, update_statement, updates
from .modules import RANDOM_OPERATIONS, Modules
from .naming import value_names
from .tensors import Tree, assignments, base_class, creation, reading


def block_class(modules: Modules, template: int, tensors: Mapping[str, HeldTensor]) -> str:
    """The class of one distinct block. `tensors`: held tensors by FQN of some unit's stage."""
    program = modules.program.templates[template]
    units = modules.units_of(template)
    owned = modules.owned(template)
    fqns = dict(units[0].tensors)
    held = {path: tensors[fqns[node]] for node, path in owned.items()}
    random, is_told = modules.uses_random(template), modules.counts_calls(template)
    scope = Scope(
        axes=modules.mesh.axes, handles=modules.handles, batch_size=modules.graph.batch_size, key=lambda v: v,
        operation_number=f"{RANDOM_OPERATIONS} * {'number' if is_told else 'self.number'}",
    )  # fmt: skip
    body = Body(reserved=modules.reserved)
    names = value_names(program.template)
    inputs = [body.argument(v, names[v.ref]) for v in program.inputs]
    arguments = [*inputs, *(body.argument(tensor_var(program, n), names[Ref(n)]) for n in modules.passed(template))]
    add_leaves(body, modules, program, scope, {node: (held[path], path) for node, path in owned.items()})
    changed = updates(program)
    for step in statements(program, scope, wanted=(*program.outputs, *changed.values())):
        body.add(step)
    if changed:
        body.add(update_statement([(owned[node], v) for node, v in changed.items()]))
    lines = body.lines(program.outputs, lambda found: returned([e.text for e in found]))
    tree = Tree()
    for path, tensor in held.items():
        tree.put(path.split("."), creation(tensor, modules.parameter_axes))
    described = f"{_span([u.fqn for u in units])}{_placed(program, inputs)}."
    text = [f"class {modules.blocks[template]}({base_class(tree)}):", f'    """{comment(described)}"""', ""]
    text += class_data(modules, held)
    keeps_number = random and not is_told
    text.append(f"    def __init__(self, mesh: DeviceMesh{', number: int' if keeps_number else ''}):")
    text += ["        super().__init__()", *handle_lines(modules, lines)]
    text += ["        self.number = number"] if keeps_number else []
    numbers = (["at"] if random else []) + (["number"] if is_told else [])
    text += [*assignments(tree, "        "), "", *signature("forward", [*arguments, *numbers])]
    text += device_line(lines, f"{arguments[0]}.device" if arguments else "next(self.parameters()).device")
    return "\n".join([*text, *lines])


def _span(fqns: Sequence[str]) -> str:
    if len(fqns) == 1:
        return fqns[0]
    return f"{fqns[0]} to {fqns[-1]}, all alike" if len(fqns) > 2 else f"{fqns[0]} and {fqns[-1]}"


def _placed(program: TemplateProgram, names: Sequence[str]) -> str:
    """How what enters and leaves a block lies on cp and tp, where that is not whole everywhere."""
    ends = [(f"{name} is", v) for name, v in zip(names, program.inputs, strict=True)]
    ends += [("returns", v) for v in program.outputs]
    ends = [(what, v) for what, v in ends if program.template.type_of(v.ref).requires_grad]
    text = ""
    for axis in ("cp", "tp"):
        pairs = [(what, v.layout.get(axis)) for what, v in ends]
        if any(pair is not None for _, pair in pairs):
            placed = (f"{what} {'R' if pair is None else forward_pair(pair)}" for what, pair in pairs)
            text += f"; on {axis} {', '.join(placed)}"
    return text


def handle_lines(modules: Modules, lines: Sequence[str]) -> Iterator[str]:
    """The axes that the lines communicate over."""
    source = "\n".join(lines)
    for axis, handle in modules.handles.items():
        if re.search(rf"{re.escape(handle)}\b", source):
            yield f'        {handle} = mesh["{axis}"]'


def class_data(modules: Modules, held: Mapping[str, HeldTensor]) -> list[str]:
    """What the functions at the end of the file need to know of a module's own tensors."""
    reshaped = {path: tensor.type.shape for path, tensor in held.items() if tensor.shape != tensor.type.shape}
    text: list[str] = []
    if reshaped:
        shapes = ", ".join(f"{quote(path)}: {literal(shape)}" for path, shape in reshaped.items())
        text.append("    # The user's shapes of these: they are held with a dim more, along which they are split.")
        text += layout(f"user_shapes = {{{shapes}}}", "    ")
    for axis in modules.reduced_axes:
        partial = [path for path, tensor in held.items() if axis in tensor.partial]
        if partial and not modules.is_all_partial(axis):
            text.append(f"    # Their gradients are partial sums over {axis} until the end of the step.")
            text += layout(f"partial_{axis} = {literal(tuple(partial))}", "    ")
    return [*text, ""] if text else []


def add_leaves(
    body: Body,
    modules: Modules,
    program: TemplateProgram,
    scope: Scope,
    tensors: Mapping[str, tuple[HeldTensor, str]],
) -> None:
    """Make known what the template's parameters, buffers and constants are written as; `tensors`: node -> its path."""
    for held in program.tensors:
        node = program.template.by_name[held.ref.node]
        if node.kind is Kind.CONSTANT:
            body.leaf(scope.key(held), _constant(node.constant, node.output.dtype))
        elif node.name in tensors:
            tensor, path = tensors[node.name]
            body.leaf(scope.key(held), reading(tensor, path, held.layout, modules.handles))


def tensor_var(program: TemplateProgram, node: str) -> Var:
    return next(held for held in program.tensors if held.ref.node == node)


def _constant(value: object, dtype: str) -> Expr:
    def lists(item: object) -> object:
        return [lists(entry) for entry in item] if isinstance(item, tuple) else item

    return Expr(f"torch.tensor({literal(lists(value))}, dtype=torch.{dtype}, device=device)", weight=1)


def returned(texts: Sequence[str]) -> str:
    return f"return {', '.join(texts)}"


def signature(name: str, arguments: Sequence[str], *, returns: str = "") -> list[str]:
    arrow = f" -> {returns}" if returns else ""
    return layout(f"def {name}({', '.join(('self', *arguments))}){arrow}:", "    ")


def device_line(lines: Sequence[str], device: str) -> list[str]:
    return [f"        device = {device}"] if any("device=device" in line for line in lines) else []


__all__ = [
    "add_leaves", "block_class", "class_data", "device_line", "handle_lines", "returned", "signature", "tensor_var",
]  # fmt: skip
