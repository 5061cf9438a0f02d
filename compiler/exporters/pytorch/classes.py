"""The classes of sharded_model.py: one per distinct block, one per pipeline stage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ....planner.capture.graph import Kind, Ref, Unit, Value
from ....planner.errors import AutoparError
from ....planner.sharding.program import Compute, TemplateProgram, Var, var
from ....planner.sharding.rules import SeedRef
from ...lower import PRELUDE, Edge, HeldTensor, LoweredModel, Run, StageProgram
from ...source import Body, Expr, Key, Loop, Statement, comment, identifier, layout, literal, quote
from .body import Scope, conversion_statement, statements, update_statement, updates
from .naming import value_names
from .tensors import Tree, access, assignments, base_class, creation, is_plain, reading

RESERVED = frozenset(
    {
        "self",
        "torch",
        "F",
        "nn",
        "dist",
        "mesh",
        "device",
        "microbatch",
        "values",
        "inputs",
        "at",
        "block",
        "checkpoint",
        "local",
    }
)
ZERO_STAGES = (0, 2, 3)
CHECKPOINTS = ("none", "full")
SCHEDULES = ("none", "gpipe", "1f1b")
# Operations that update the buffers they are given whenever they run.
UPDATES_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")
RANDOM_OPERATIONS = 1000  # numbers set aside for the random operations of one unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the plan says beside placements."""

    zero: int
    activation_checkpoint: str
    schedule: str

    def __post_init__(self) -> None:
        for name, value, known in (
            ("zero", self.zero, ZERO_STAGES),
            ("activation_checkpoint", self.activation_checkpoint, CHECKPOINTS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise AutoparError(
                    f"no code can be written for {name}={value}",
                    where=f"plan.json: {name}",
                    fix=f"choose one of {', '.join(map(str, known))}",
                )


class Writer:
    """Names the classes once, then writes each."""

    def __init__(self, model: LoweredModel, options: Options, reserved: frozenset[str]) -> None:
        self.model = model
        self.options = options
        self.program = model.program
        self.graph = model.graph
        self.mesh = model.program.mesh
        self.reserved = RESERVED | reserved
        self.handles = {axis.name: f"self.{axis.name}" for axis in self.mesh.axes if not axis.is_time}
        self.blocks = self._block_names()
        self.prelude_names = self._prelude_names()

    def _block_names(self) -> dict[int, str]:
        """Template index -> class name, for templates that are modules of their own."""
        taken = {"Weights", "Stage", "FirstStage", "LastStage", "DTensor", "Replicate", "Shard", "DeviceMesh"}
        fqns: dict[str, set[int]] = {}
        for unit in self.graph.units[1:]:
            fqns.setdefault(unit.fqn, set()).add(unit.template)
        names: dict[int, str] = {}
        for index, template in enumerate(self.graph.templates):
            units = [unit for unit in self.graph.units[1:] if unit.template == index]
            if not template.is_module or not units or any(len(fqns[u.fqn]) > 1 or not u.fqn for u in units):
                continue
            name = base = identifier(template.name, "Block")
            number = 2
            while name in taken:
                name, number = f"{base}{number}", number + 1
            taken.add(name)
            names[index] = name
        return names

    def _prelude_names(self) -> dict[Value, str]:
        template = self.graph.templates[self.graph.units[PRELUDE].template]
        names = value_names(template)
        nodes = template.of_kind(Kind.INPUT)
        input_names = {n.name: given.name for n, given in zip(nodes, self.graph.inputs, strict=True)}
        found: dict[Value, str] = {}
        for output, ref in enumerate(template.outputs):
            is_input = template.by_name[ref.node].kind is Kind.INPUT
            base = input_names[ref.node] if is_input else names[ref]
            name, number = base, 2
            while name in found.values():
                name, number = f"{base}_{number}", number + 1
            found[Value(PRELUDE, output)] = name
        return found

    # ---- what a tensor of a unit is called

    def own(self, unit: Unit) -> dict[str, str]:
        """Tensors of a unit that live below its FQN: node name -> path relative to it."""
        prefix = f"{unit.fqn}."
        return {node: fqn[len(prefix) :] for node, fqn in unit.tensors if fqn.startswith(prefix)}

    def owned(self, template: int) -> dict[str, str]:
        """Tensors that every unit of a block's template holds itself; the others are passed to forward."""
        units = [unit for unit in self.graph.units[1:] if unit.template == template]
        first = self.own(units[0])
        return {node: path for node, path in first.items() if all(self.own(unit).get(node) == path for unit in units)}

    def passed(self, template: int) -> list[str]:
        """Parameters and buffers of a block that lie outside it, in node order."""
        owned = self.owned(template)
        tensors = self.graph.templates[template].nodes
        return [n.name for n in tensors if n.kind in (Kind.PARAMETER, Kind.BUFFER) and n.name not in owned]

    def summed(self, tensor: HeldTensor) -> tuple[str, ...]:
        """Axes over which the gradient of a parameter is added once a step, by FSDP2 or by `reduce_gradients`."""
        return tensor.partial

    def uses_random(self, template: int) -> bool:
        return any(
            isinstance(arg, SeedRef)
            for step in self.program.templates[template].steps
            if isinstance(step, Compute)
            for arg in (*step.call.args, *(value for _, value in step.call.kwargs))
        )

    # ---- blocks

    def block_class(self, template: int, tensors: Mapping[str, HeldTensor]) -> str:
        """The class of one distinct block. `tensors`: held tensors by FQN of some unit's stage."""
        program = self.program.templates[template]
        unit = next(unit for unit in self.graph.units if unit.template == template)
        owned = self.owned(template)
        fqns = dict(unit.tensors)
        held = {path: tensors[fqns[node]] for node, path in owned.items()}
        scope = Scope(
            axes=self.mesh.axes, handles=self.handles, batch_size=self.graph.batch_size, key=lambda v: v,
            operation_number=f"{RANDOM_OPERATIONS} * self.number",
        )  # fmt: skip
        body = Body(reserved=self.reserved)
        names = value_names(program.template)
        arguments = [body.argument(v, names[v.ref]) for v in program.inputs]
        for node in self.passed(template):
            arguments.append(body.argument(_tensor_var(program, node), names[Ref(node)]))
        self._leaves(body, program, scope, {node: (held[path], path) for node, path in owned.items()})
        changed = updates(program)
        for step in statements(program, scope, wanted=(*program.outputs, *changed.values())):
            body.add(step)
        if changed:
            body.add(update_statement([(owned[node], v) for node, v in changed.items()]))
        lines = body.lines(program.outputs, lambda found: _return([e.text for e in found]))
        if self.uses_random(template):
            arguments.append("at")
        name = self.blocks[template]
        units = [u.fqn for u in self.graph.units[1:] if u.template == template]
        tree = Tree()
        for path, tensor in held.items():
            tree.put(path.split("."), creation(tensor, tp=self.mesh.tp > 1))
        text = [f"class {name}({base_class(tree)}):", f'    """{comment(_span(units))}."""', ""]
        text += self._class_data(held)
        text += self._constructor(tree, lines, random=self.uses_random(template))
        text += ["", *_signature("forward", arguments)]
        text += _device_line(lines, f"{arguments[0]}.device" if arguments else "next(self.parameters()).device")
        return "\n".join([*text, *lines])

    def _constructor(self, tree: Tree, lines: Sequence[str], *, random: bool) -> list[str]:
        signature = "self, mesh: DeviceMesh, number: int" if random else "self, mesh: DeviceMesh"
        text = [f"    def __init__({signature}):", "        super().__init__()"]
        text += self._handle_lines(lines)
        text += ["        self.number = number"] if random else []
        return [*text, *assignments(tree, "        ")]

    def _handle_lines(self, lines: Sequence[str]) -> Iterator[str]:
        source = "\n".join(lines)
        for axis, handle in self.handles.items():
            if f"{handle}," in source or f"{handle})" in source or f"{handle}." in source:
                yield f'        {handle} = mesh["{axis}"]'

    def _class_data(self, held: Mapping[str, HeldTensor]) -> list[str]:
        """What the functions at the end of the file need to know of a module's own tensors."""
        fused = {path: tensor.fused_dim for path, tensor in held.items() if tensor.fused_dim is not None}
        text: list[str] = []
        if fused:
            text.append(
                "    # Held with the parts of this dim as a dim of their own; checkpoints have the two flattened."
            )
            text += layout(f"fused = {{{', '.join(f'{quote(p)}: {d}' for p, d in fused.items())}}}", "    ")
        for axis in self.reduced_axes():
            partial = [path for path, tensor in held.items() if axis in tensor.partial]
            if partial:
                text.append(f"    # Their gradients are partial sums over {axis} until the end of the step.")
                text += layout(f"partial_{axis} = {literal(tuple(partial))}", "    ")
        return [*text, ""] if text else []

    def reduced_axes(self) -> tuple[str, ...]:
        """Axes whose partial gradients `reduce_gradients` adds up: tp always, dp where FSDP2 does not."""
        found = ("tp",) if self.mesh.tp > 1 else ()
        return (*found, "dp") if self.mesh.dp > 1 and self.options.zero < 2 else found

    def _leaves(
        self, body: Body, program: TemplateProgram, scope: Scope, tensors: Mapping[str, tuple[HeldTensor, str]]
    ) -> None:
        for held in program.tensors:
            node = program.template.by_name[held.ref.node]
            if node.kind is Kind.CONSTANT:
                body.leaf(scope.key(held), _constant(node.constant, node.output.dtype))
            elif node.name in tensors:
                tensor, path = tensors[node.name]
                body.leaf(scope.key(held), reading(tensor, path, held.layout, self.handles, self.summed(tensor)))

    # ---- stages

    def stage_name(self, index: int) -> str:
        if self.mesh.pp == 1:
            return "Stage"
        return "FirstStage" if index == 0 else "LastStage" if index == self.mesh.pp - 1 else f"Stage{index}"

    def stage_class(self, stage: StageProgram) -> str:
        held = {tensor.fqn: tensor for tensor in stage.tensors}
        inside = {
            fqn
            for unit in (self.graph.units[u] for u in range(stage.first, stage.last))
            if unit.template in self.blocks
            for node, fqn in unit.tensors
            if node in self.owned(unit.template)
        }
        outside = {fqn: tensor for fqn, tensor in held.items() if fqn not in inside}
        prepare = self._prepare(stage, held)
        arguments, forward = self._forward(stage, held)
        tree = self._tree(stage, outside)
        name = self.stage_name(stage.index)
        text = [f"class {name}({base_class(tree)}):", f'    """{comment(self._described(stage))}."""', ""]
        text += self._class_data(outside)
        text += self._batch_dims(stage)
        text += ["    def __init__(self, mesh: DeviceMesh):", "        super().__init__()"]
        text += self._handle_lines([*forward, *prepare])
        text += [*assignments(tree, "        "), "", *prepare, ""]
        text += _signature("forward", [*arguments, "microbatch"])
        text += self._preamble(stage, forward)
        return "\n".join([*text, *forward])

    def _described(self, stage: StageProgram) -> str:
        names = [self.graph.units[unit].fqn for run in stage.runs for unit in run.units]
        names = [name for name in dict.fromkeys(names) if name]
        where = f"Stage {stage.index} of {self.mesh.pp}" if self.mesh.pp > 1 else "The whole model"
        if len(names) > 1:
            return f"{where}: {names[0]} to {names[-1]}"
        return f"{where}: {names[0]}" if names else where

    def _preamble(self, stage: StageProgram, lines: Sequence[str]) -> Iterator[str]:
        source = "\n".join(lines)
        if "values[" in source:
            yield "        values = self.microbatches[int(microbatch)]"
        if re.search(r"\bat\b", source):
            yield "        at = (self.step, int(microbatch))"
        if "device=device" in source:
            yield "        device = next(self.parameters()).device"

    def _tree(self, stage: StageProgram, outside: Mapping[str, HeldTensor]) -> Tree:
        """The modules of a stage in the order of the user's FQNs as they are met."""
        tree = Tree()
        for fqn, tensor in outside.items():
            tree.put(fqn.split("."), creation(tensor, tp=self.mesh.tp > 1))
        for unit in range(stage.first, stage.last):
            template = self.graph.units[unit].template
            if template in self.blocks:
                number = f", number={unit}" if self.uses_random(template) else ""
                tree.put(self.graph.units[unit].fqn.split("."), f"{self.blocks[template]}(mesh{number})")
        return tree

    def values(self, stage: StageProgram) -> dict[str, Edge]:
        """What `prepare` returns: name -> an edge that is fed with it."""
        edges = [edge for run in stage.runs for edge in run.edges if edge.value.unit == PRELUDE]
        wanted = {_slot(edge): edge for edge in edges}
        found: dict[str, Edge] = {}
        for edge in sorted(wanted.values(), key=lambda e: (e.value.output, e.batch is None, e.batch, len(e.prepared))):
            name = base = self.prelude_names[edge.value]
            number = 2
            while name in found:
                is_whole = edge.batch is None and f"{base}_whole" not in found
                name, number = f"{base}_whole" if is_whole else f"{base}_{number}", number + 1
            found[name] = edge
        return found

    def _batch_dims(self, stage: StageProgram) -> list[str]:
        if self.mesh.microbatches == 1:
            return []
        slices = {name: edge.batch for name, edge in self.values(stage).items() if edge.batch is not None}
        inner = ", ".join(f"{quote(n)}: {literal(s if self.has_groups() else s[0])}" for n, s in slices.items())
        note = "dim (and number of runs in it)" if self.has_groups() else "dim"
        return [
            f"    # {note} of each value along which the microbatches are cut; other values are alike in all of them",
            *layout(f"batch_dims = {{{inner}}}", "    "),
            "",
        ]

    def has_groups(self) -> bool:
        return any(
            edge.batch is not None and edge.batch[1] > 1
            for stage in self.model.stages
            for edge in self.values(stage).values()
        )

    def _prepare(self, stage: StageProgram, held: Mapping[str, HeldTensor]) -> list[str]:
        unit = self.graph.units[PRELUDE]
        program = self.program.templates[unit.template]
        scope = Scope(axes=self.mesh.axes, handles=self.handles, batch_size=self.graph.batch_size, key=lambda v: v)
        body = Body(reserved=self.reserved)
        for v, model_input in zip(program.inputs, self.graph.inputs, strict=True):
            body.leaf(scope.key(v), Expr(f"inputs[{quote(model_input.name)}]"))
        fqns = dict(unit.tensors)
        self._leaves(body, program, scope, {n: (held[f], f) for n, f in fqns.items() if f in held})
        values = self.values(stage)
        made = {edge.value: program.outputs[edge.value.output] for edge in values.values()}
        for step in statements(program, scope, wanted=made.values()):
            body.add(step)
        outputs = [self._prepared(body, edge, made[edge.value], scope) for edge in values.values()]

        def finish(found: Sequence[Expr]) -> str:
            pairs = ", ".join(f"{quote(name)}: {expr.text}" for name, expr in zip(values, found, strict=True))
            return f"return {{{pairs}}}"

        lines = body.lines(outputs, finish)
        text = _signature("prepare", ["inputs: dict[str, torch.Tensor]"], returns="dict[str, torch.Tensor]")
        text.append('        """What follows from the inputs alone, once a step for all microbatches."""')
        first = f"inputs[{quote(self.graph.inputs[0].name)}]" if self.graph.inputs else "next(self.parameters())"
        text += _device_line(lines, f"{first}.device")
        return [*text, *lines]

    def _prepared(self, body: Body, edge: Edge, made: Var, scope: Scope) -> Key:
        """Add the conversions that `prepare` runs, each once; the key of the converted value."""
        source, state = made, made.layout
        for change in edge.prepared:
            target = var(made.ref, {**state, change.axis: change.target})
            if not body.has(target):
                name = self.prelude_names[edge.value]
                body.add(conversion_statement(change, state, scope, source=source, target=target, name=name))
            source, state = target, target.layout
        return source

    def _forward(self, stage: StageProgram, held: Mapping[str, HeldTensor]) -> tuple[list[str], list[str]]:
        body = Body(reserved=self.reserved)
        names = self._stage_names()
        self.updated: list[tuple[str, Key]] = []
        arguments = [body.argument(value, names[value]) for value in stage.received]
        for name, edge in self.values(stage).items():
            body.leaf(_slot(edge), Expr(f"values[{quote(name)}]"))
        for run in stage.runs:
            if run.template in self.blocks:
                self._call_blocks(body, run, names, held)
            else:
                self._inline_unit(body, run, held, names)
        if self.updated:
            body.add(update_statement(self.updated))
        if stage.index == self.mesh.pp - 1:
            return arguments, body.lines([self.graph.loss], lambda found: _return([found[0].text]))
        return arguments, body.lines(stage.sent, lambda found: _return([f"{e.at(7)}.contiguous()" for e in found]))

    def _stage_names(self) -> dict[Value, str]:
        found: dict[Value, str] = {}
        for index, unit in enumerate(self.graph.units):
            template = self.graph.templates[unit.template]
            names = value_names(template)
            for output, ref in enumerate(template.outputs):
                found[Value(index, output)] = names[ref]
        return found

    def _edge(
        self,
        body: Body,
        edge: Edge,
        key: Key,
        scope: Scope,
        name: str,
        *,
        into: list[Statement] | None = None,
        start: Key = None,
    ) -> Key:
        """Add the conversions of an input; the key of the converted value."""
        source = _source(edge) if start is None else start
        state = dict(edge.layout)
        for index, change in enumerate(edge.changes):
            target: Key = (key, index)
            step = conversion_statement(change, state, scope, source=source, target=target, name=name)
            if into is None:
                body.add(step)
            else:
                into.append(step)
            state[change.axis] = change.target
            source = target
        return source

    def _inline_unit(
        self, body: Body, run: Run, held: Mapping[str, HeldTensor], stage_names: Mapping[Value, str]
    ) -> None:
        (index,) = run.units
        unit = self.graph.units[index]
        program = self.program.templates[run.template]
        outputs = {var_: Value(index, output) for output, var_ in enumerate(program.outputs)}
        inputs: dict[Var, Key] = {}

        def key(v: Var) -> Key:
            return inputs.get(v) or outputs.get(v) or (index, v)

        scope = Scope(
            axes=self.mesh.axes, handles=self.handles, batch_size=self.graph.batch_size, key=key,
            operation_number=str(RANDOM_OPERATIONS * index), group=index, heading=unit.fqn,
        )  # fmt: skip
        fqns = dict(unit.tensors)
        self._leaves(body, program, scope, {n: (held[f], f) for n, f in fqns.items() if f in held})
        for position, (edge, v) in enumerate(zip(run.edges, program.inputs, strict=True)):
            name = stage_names.get(edge.value) or self.prelude_names.get(edge.value, "x")
            inputs[v] = self._edge(body, edge, (index, "edge", position), scope, name)
        changed = updates(program)
        for step in statements(program, scope, wanted=(*program.outputs, *changed.values())):
            body.add(step)
        self.updated.extend((fqns[node], key(v)) for node, v in changed.items())
        for output, v in enumerate(program.outputs):
            if key(v) != Value(index, output):  # an input or another output handed on
                body.add(_same(key(v), Value(index, output), "x"))

    def _call_blocks(self, body: Body, run: Run, names: Mapping[Value, str], held: Mapping[str, HeldTensor]) -> None:
        scope = Scope(
            axes=self.mesh.axes,
            handles=self.handles,
            batch_size=self.graph.batch_size,
            key=lambda v: v,
            group=run.units[0],
        )
        first, last = self.graph.units[run.units[0]], run.units[-1]
        template = self.graph.templates[run.template]
        carried = dict(run.carried)
        random = self.uses_random(run.template)
        looped = len(run.units) > 1
        operands: list[Key] = []
        starts: list[Key] = []
        inside: list[Key] = []
        back: list[int | None] = []
        steps: list[Statement] = []
        for position, edge in enumerate(run.edges):
            name = names.get(edge.value) or self.prelude_names.get(edge.value, "x")
            key: Key = (run.units[0], "edge", position)
            is_outside = edge.value.unit == PRELUDE and position not in carried
            if not looped or is_outside or (position in carried and not run.later[position].changes):
                start = found = self._edge(body, edge, key, scope, name)
            else:
                start, found = _source(edge), None
            if not looped:
                operands.append(start)
                continue
            # Positions that are carried by one output are one variable.
            same = next((i for i, p in enumerate(starts) if p == start and back[i] == carried.get(position)), None)
            if same is None:
                starts.append(start)
                inside.append((run.units[0], "inside", position))
                back.append(carried.get(position))
                same = len(starts) - 1
            if found is None and edge.changes:
                operands.append(self._edge(body, edge, key, scope, name, into=steps, start=inside[same]))
            else:
                operands.append(inside[same])
        for node in self.passed(run.template):
            tensor = held[dict(first.tensors)[node]]
            wanted = _tensor_var(self.program.templates[run.template], node).layout
            key = (run.units[0], "tensor", node)
            body.leaf(key, reading(tensor, tensor.fqn, wanted, self.handles, self.summed(tensor)))
            operands.append(key)
            if looped:
                starts.append(key)
                inside.append((key, "inside"))
                back.append(None)
                operands[-1] = inside[-1]
        results = tuple(Value(last, output) for output in range(len(template.outputs)))
        callee = "block" if looped else access(first.fqn)

        def call(found: Sequence[Expr]) -> Expr:
            arguments = [expr.text for expr in found] + (["at"] if random else [])
            return Expr(self._checkpointed(run.template, callee, arguments))

        statement = Statement(
            results=results, operands=tuple(operands), render=call, names=tuple(names[value] for value in results),
            group=run.units[0],
        )  # fmt: skip
        if not looped:
            body.add(statement)
            return
        body.add(
            Loop(
                results=results, starts=tuple(starts), inside=tuple(inside), back=tuple(back),
                header=self._loop_header(run), steps=(*steps, statement),
            )
        )  # fmt: skip

    def _checkpointed(self, template: int, callee: str, arguments: Sequence[str]) -> str:
        if self.options.activation_checkpoint == "none":
            return f"{callee}({', '.join(arguments)})"
        inside = ", ".join((callee, *arguments))
        if self.updates_statistics(template):
            return f"recomputed({inside})"
        return f"checkpoint({inside}, use_reentrant=False, preserve_rng_state=False)"

    def updates_statistics(self, template: int) -> bool:
        """Whether running a block changes its buffers, so that recomputing it must not.

        Raises:
            AutoparError: buffers that lie outside the block.
        """
        nodes = self.graph.templates[template]
        updated = {
            ref.node
            for node in nodes.of_kind(Kind.OP)
            if node.op in UPDATES_STATISTICS
            for ref in node.operands
            if nodes.by_name[ref.node].kind is Kind.BUFFER
        }
        if outside := updated - self.owned(template).keys():
            raise AutoparError(
                f"activation checkpointing would update the running statistics {min(outside)} twice: they lie outside "
                f"the block {nodes.pattern or nodes.name} that is recomputed",
                fix="plan with --activation-checkpoint none",
            )
        return bool(updated)

    def _loop_header(self, run: Run) -> str:
        fqns = [self.graph.units[unit].fqn for unit in run.units]
        parents = {fqn.rpartition(".")[0] for fqn in fqns}
        stage = next(stage for stage in self.model.stages if stage.first <= run.units[0] < stage.last)
        if len(parents) == 1 and len(set(fqns)) == len(fqns):
            (parent,) = parents
            prefix = f"{parent}." if parent else ""
            siblings = {
                name[len(prefix) :].partition(".")[0]
                for name in self._module_paths(stage)
                if name.startswith(prefix) and parent
            }
            children = [fqn[len(prefix) :] for fqn in fqns]
            if siblings == set(children) and all(not is_plain(name) for name in children):
                return f"for block in {access(parent)}.values():"
        if len(set(fqns)) == 1:
            return f"for block in [{access(fqns[0])}] * {len(fqns)}:"
        return f"for block in ({', '.join(access(fqn) for fqn in fqns)}):"

    def _module_paths(self, stage: StageProgram) -> set[str]:
        units = {self.graph.units[u].fqn for u in range(stage.first, stage.last)}
        return {tensor.fqn for tensor in stage.tensors} | {fqn for fqn in units if fqn}


def _slot(edge: Edge) -> Key:
    """What tells the values apart that `prepare` returns."""
    return edge.value, edge.prepared, edge.batch


def _source(edge: Edge) -> Key:
    return _slot(edge) if edge.value.unit == PRELUDE else edge.value


def _same(source: Key, target: Key, name: str) -> Statement:
    return Statement(results=(target,), operands=(source,), render=lambda found: found[0], names=(name,), inline=False)


def _tensor_var(program: TemplateProgram, node: str) -> Var:
    return next(held for held in program.tensors if held.ref.node == node)


def _constant(value: object, dtype: str) -> Expr:
    def lists(item: object) -> object:
        return [lists(entry) for entry in item] if isinstance(item, tuple) else item

    return Expr(f"torch.tensor({literal(lists(value))}, dtype=torch.{dtype}, device=device)", weight=1)


def _return(texts: Sequence[str]) -> str:
    return f"return {', '.join(texts)}"


def _signature(name: str, arguments: Sequence[str], *, returns: str = "") -> list[str]:
    arrow = f" -> {returns}" if returns else ""
    return layout(f"def {name}({', '.join(('self', *arguments))}){arrow}:", "    ")


def _device_line(lines: Sequence[str], device: str) -> list[str]:
    return [f"        device = {device}"] if any("device=device" in line for line in lines) else []


def _span(fqns: Sequence[str]) -> str:
    if len(fqns) == 1:
        return fqns[0]
    return f"{fqns[0]} to {fqns[-1]}, all alike" if len(fqns) > 2 else f"{fqns[0]} and {fqns[-1]}"


__all__ = ["RESERVED", "Options", "Writer"]
