"""The methods of a stage as text: `prepare`, once a step, and `forward`, once a microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ....planner.capture.graph import Value
from ....planner.sharding.program import Var, var
from ...held import PRELUDE, HeldTensor
from ...lower import Edge, Run, StageProgram
from ...source import ATOM, Body, Expr, Key, Loop, Statement
from ...text import quote
from .blocks import add_leaves, device_line, returned, signature, tensor_var
from .body import Scope, conversion_statement, statements, update_statement, updates
from .modules import RANDOM_OPERATIONS, Modules
from .naming import value_names
from .tensors import access, is_plain, reading


def prepared_values(modules: Modules, stage: StageProgram) -> dict[str, Edge]:
    """What `prepare` returns: name -> an edge that is fed with it."""
    edges = [edge for run in stage.runs for edge in run.edges if edge.value.unit == PRELUDE]
    wanted = {_slot(edge): edge for edge in edges}
    found: dict[str, Edge] = {}
    for edge in sorted(wanted.values(), key=lambda e: (e.value.output, e.batch is None, e.batch, len(e.prepared))):
        name = base = modules.prelude_names[edge.value]
        number = 2
        while name in found:
            is_whole = edge.batch is None and f"{base}_whole" not in found
            name, number = f"{base}_whole" if is_whole else f"{base}_{number}", number + 1
        found[name] = edge
    return found


def _slot(edge: Edge) -> Key:
    """What tells the values apart that `prepare` returns."""
    return edge.value, edge.prepared, edge.batch


def _source(edge: Edge) -> Key:
    return _slot(edge) if edge.value.unit == PRELUDE else edge.value


def prepare_lines(modules: Modules, stage: StageProgram) -> list[str]:
    """The method `prepare` of a stage."""
    graph = modules.graph
    unit = graph.units[PRELUDE]
    program = modules.program.templates[unit.template]
    scope = Scope(
        axes=modules.mesh.axes,
        handles=modules.handles,
        batch_size=graph.batch_size,
        key=lambda v: v,
        has_any_size=bool(modules.mesh.shares),
    )
    body = Body(reserved=modules.reserved)
    for v, model_input in zip(program.inputs, graph.inputs, strict=True):
        body.leaf(scope.key(v), Expr(f"inputs[{quote(model_input.name)}]"))
    held = {tensor.fqn: tensor for tensor in stage.tensors}
    fqns = dict(unit.tensors)
    add_leaves(body, modules, program, scope, {n: (held[f], f) for n, f in fqns.items() if f in held})
    values = prepared_values(modules, stage)
    made = {edge.value: program.outputs[edge.value.output] for edge in values.values()}
    for step in statements(program, scope, wanted=made.values()):
        body.add(step)
    outputs = [_prepared(body, modules, edge, made[edge.value], scope) for edge in values.values()]

    def finish(found: Sequence[Expr]) -> str:
        pairs = ", ".join(f"{quote(name)}: {expr.text}" for name, expr in zip(values, found, strict=True))
        return f"return {{{pairs}}}"

    lines = body.lines(outputs, finish)
    text = signature("prepare", ["inputs: dict[str, torch.Tensor]"], returns="dict[str, torch.Tensor]")
    text.append('        """What follows from the inputs alone, once a step for all microbatches."""')
    first = f"inputs[{quote(graph.inputs[0].name)}]" if graph.inputs else "next(self.parameters())"
    return [*text, *device_line(lines, f"{first}.device"), *lines]


def _prepared(body: Body, modules: Modules, edge: Edge, made: Var, scope: Scope) -> Key:
    """Add the conversions that `prepare` runs, each once; the key of the converted value."""
    source, state = made, made.layout
    for change in edge.prepared:
        target = var(made.ref, {**state, change.axis: change.target})
        if not body.has(target):
            name = modules.prelude_names[edge.value]
            body.add(conversion_statement(change, state, scope, source=source, target=target, name=name))
        source, state = target, target.layout
    return source


def forward_lines(modules: Modules, stage: StageProgram) -> tuple[list[str], list[str]]:
    """Arguments and body of a stage's `forward`."""
    names = _value_names(modules)
    body = Body(reserved=modules.reserved)
    writer = _Forward(modules, body, names, {tensor.fqn: tensor for tensor in stage.tensors})
    arguments = [body.argument(value, names[value]) for value in stage.received]
    for name, edge in prepared_values(modules, stage).items():
        body.leaf(_slot(edge), Expr(f"values[{quote(name)}]"))
    for run in stage.runs:
        if run.template in modules.blocks:
            writer.call_blocks(run)
        else:
            writer.inline_unit(run)
    if writer.updated:
        body.add(update_statement(writer.updated))
    if stage.index == len(modules.model.stages) - 1:
        return arguments, body.lines([modules.graph.loss], lambda found: returned([found[0].text]))
    return arguments, body.lines(stage.sent, lambda found: returned([f"{e.at(ATOM)}.contiguous()" for e in found]))


def _value_names(modules: Modules) -> dict[Value, str]:
    names = [value_names(template) for template in modules.graph.templates]
    return {
        Value(index, output): names[unit.template][ref]
        for index, unit in enumerate(modules.graph.units)
        for output, ref in enumerate(modules.graph.templates[unit.template].outputs)
    }


@dataclass(slots=True)
class _Loop:
    """A loop while its operands are gathered: one entry per variable that the body reads."""

    starts: list[Key] = field(default_factory=list)
    inside: list[Key] = field(default_factory=list)
    back: list[int | None] = field(default_factory=list)
    steps: list[Statement] = field(default_factory=list)

    def variable(self, start: Key, key: Key, back: int | None) -> Key:
        """The variable that begins as `start`. Operands that are carried by one output are one variable."""
        for known, inside, other in zip(self.starts, self.inside, self.back, strict=True):
            if (known, other) == (start, back):
                return inside
        self.starts.append(start)
        self.inside.append(key)
        self.back.append(back)
        return key


class _Forward:
    """Adds the units of a stage to a body."""

    def __init__(
        self, modules: Modules, body: Body, names: Mapping[Value, str], held: Mapping[str, HeldTensor]
    ) -> None:
        self.modules = modules
        self.body = body
        self.names = names
        self.held = held
        self.updated: list[tuple[str, Key]] = []

    def _scope(self, index: int, key: object = None) -> Scope:
        modules = self.modules
        return Scope(
            axes=modules.mesh.axes, handles=modules.handles, batch_size=modules.graph.batch_size,
            key=key if callable(key) else lambda v: v, operation_number=str(RANDOM_OPERATIONS * index),
            what=modules.graph.units[index].fqn,
        )  # fmt: skip

    def _name(self, edge: Edge) -> str:
        return self.names.get(edge.value) or self.modules.prelude_names.get(edge.value, "x")

    def _edge(self, edge: Edge, key: Key, scope: Scope, loop: _Loop | None = None, start: Key = None) -> Key:
        """Add the conversions of an input, to a loop's body or in front; the key of the converted value."""
        source = _source(edge) if start is None else start
        state = dict(edge.layout)
        for index, change in enumerate(edge.changes):
            target: Key = (key, index)
            step = conversion_statement(change, state, scope, source=source, target=target, name=self._name(edge))
            if loop is None:
                self.body.add(step)
            else:
                loop.steps.append(step)
            state[change.axis] = change.target
            source = target
        return source

    def inline_unit(self, run: Run) -> None:
        """The statements of a unit that is no block."""
        (index,) = run.units
        unit = self.modules.graph.units[index]
        program = self.modules.program.templates[run.template]
        outputs = {made: Value(index, output) for output, made in enumerate(program.outputs)}
        inputs: dict[Var, Key] = {}

        def key(v: Var) -> Key:
            return inputs.get(v) or outputs.get(v) or (index, v)

        scope = self._scope(index, key)
        fqns = {node: fqn for node, fqn in unit.tensors if fqn in self.held}
        tensors = {node: (self.held[fqn], fqn) for node, fqn in fqns.items()}
        add_leaves(self.body, self.modules, program, scope, tensors)
        for position, (edge, v) in enumerate(zip(run.edges, program.inputs, strict=True)):
            inputs[v] = self._edge(edge, (index, "edge", position), scope)
        changed = updates(program)
        for step in statements(program, scope, wanted=(*program.outputs, *changed.values())):
            self.body.add(step)
        self.updated.extend((fqns[node], key(v)) for node, v in changed.items())
        for output, v in enumerate(program.outputs):
            if key(v) != Value(index, output):  # an input or another output handed on
                self.body.add(_same(key(v), Value(index, output), "x"))

    def call_blocks(self, run: Run) -> None:
        """The call of a block, or the loop over several."""
        modules = self.modules
        first = modules.graph.units[run.units[0]]
        template = modules.graph.templates[run.template]
        scope = self._scope(run.units[0])
        loop = _Loop() if modules.is_looped(run) else None
        operands = [self._operand(run, position, scope, loop) for position in range(len(run.edges))]
        for node in modules.passed(run.template):
            tensor = self.held[dict(first.tensors)[node]]
            wanted = tensor_var(modules.program.templates[run.template], node).layout
            key: Key = (run.units[0], "tensor", node)
            self.body.leaf(key, reading(tensor, tensor.fqn, wanted, modules.handles))
            operands.append(key if loop is None else loop.variable(key, (key, "inside"), None))
        numbers = ["at"] if modules.uses_random(run.template) else []
        if modules.counts_calls(run.template):
            numbers.append(str(run.units[0]) if loop is None else "number")
        callee = access(first.fqn) if loop is None else "block"

        def call(found: Sequence[Expr]) -> Expr:
            return Expr(self._call(run, callee, [*(expr.text for expr in found), *numbers]))

        results = tuple(Value(run.units[-1], output) for output in range(len(template.outputs)))
        names = tuple(self.names[value] for value in results)
        statement = Statement(results=results, operands=tuple(operands), render=call, names=names)
        if loop is None:
            self.body.add(statement)
            return
        self.body.add(
            Loop(
                results=results, starts=tuple(loop.starts), inside=tuple(loop.inside), back=tuple(loop.back),
                header=self._loop_header(run), steps=(*loop.steps, statement),
            )
        )  # fmt: skip

    def _operand(self, run: Run, position: int, scope: Scope, loop: _Loop | None) -> Key:
        """One input of a block; conversions that every turn needs go into the loop."""
        edge, carried = run.edges[position], dict(run.carried)
        key: Key = (run.units[0], "edge", position)
        back = carried.get(position)
        is_outside = edge.value.unit == PRELUDE and back is None
        if loop is None or is_outside or (back is not None and not run.later[position].changes):
            found = self._edge(edge, key, scope)
            return found if loop is None else loop.variable(found, (run.units[0], "inside", position), back)
        inside = loop.variable(_source(edge), (run.units[0], "inside", position), back)
        return self._edge(edge, key, scope, loop, start=inside)

    def _call(self, run: Run, callee: str, arguments: Sequence[str]) -> str:
        inside = ", ".join((callee, *arguments))
        if self.modules.is_looked_up(run):
            return f"run_block({inside})"
        policy = self.modules.policy_of(run.units[0])
        if policy == "none":
            return f"{callee}({', '.join(arguments)})"
        return self.modules.recomputed_call(inside, policy, updates=self.modules.updates_statistics(run.template))

    def _loop_header(self, run: Run) -> str:
        blocks = self._looped_blocks(run)
        if self.modules.counts_calls(run.template):
            return f"for number, block in enumerate({blocks}, {run.units[0]}):"
        return f"for block in {blocks}:"

    def _looped_blocks(self, run: Run) -> str:
        fqns = [self.modules.graph.units[unit].fqn for unit in run.units]
        parents = {fqn.rpartition(".")[0] for fqn in fqns}
        if len(parents) == 1 and len(set(fqns)) == len(fqns):
            (parent,) = parents
            if parent and self._children(parent, run) == set(fqns):
                return f"{access(parent)}.values()"
        if len(set(fqns)) == 1:
            return f"[{access(fqns[0])}] * {len(fqns)}"
        return f"({', '.join(access(fqn) for fqn in fqns)})"

    def _children(self, parent: str, run: Run) -> set[str]:
        """The modules below `parent` that the stage holds, where it is a container of numbered ones."""
        units = self.modules.graph.units
        stage = next(stage for stage in self.modules.model.stages if stage.first <= run.units[0] < stage.last)
        paths = {*self.held, *(units[unit].fqn for unit in range(stage.first, stage.last))}
        below = {path[len(parent) + 1 :].partition(".")[0] for path in paths if path.startswith(f"{parent}.")}
        return {f"{parent}.{name}" for name in below} if not any(map(is_plain, below)) else set()


def _same(source: Key, target: Key, name: str) -> Statement:
    return Statement(results=(target,), operands=(source,), render=lambda found: found[0], names=(name,), inline=False)


__all__ = ["forward_lines", "prepare_lines", "prepared_values"]
