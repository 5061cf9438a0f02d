"""Graph + placements + mesh -> the local program of every template: local types, calls and conversions, in order.

The one place that decides which conversions run and who shares them. The search reads it to price a plan exactly, the
compiler reads it to write code, verify reads it to know every collective: all three therefore speak of the same
program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from ..capture.graph import Kind, ModelGraph, Node, Ref, Template, TensorType, Value, without_gradient
from ..errors import CannotLower
from .mesh import MICROBATCH, Axis, Mesh
from .placement import REPLICATED, Layout, Pair, can_split, local_type, normal, parse_pair
from .redistribute import Change, CollectiveUse, changes
from .rules import Call, Option, label_groups, options_of, rule_of
from .rules.registry import same_call

# node name -> axis name -> the option's label (operations) or the pair's text (inputs, parameters, buffers, constants).
# An axis that is not named means "none" or R.
TemplatePlacement = Mapping[str, Mapping[str, str]]
Placements = Sequence[TemplatePlacement]  # aligned with ModelGraph.templates


@dataclass(frozen=True, slots=True)
class Var:
    """A value in one layout: the key of a local tensor. `pairs` is sorted by axis and leaves out R."""

    ref: Ref
    pairs: tuple[tuple[str, Pair], ...] = ()

    @property
    def layout(self) -> dict[str, Pair]:
        return dict(self.pairs)


def var(ref: Ref, layout: Layout) -> Var:
    return Var(ref, tuple(sorted((axis, pair) for axis, pair in layout.items() if pair != REPLICATED)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Convert:
    """One conversion on one axis: `source` is read, `target` is made."""

    source: Var
    target: Var
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """One local operation. `operands` follows `node.operands`; `operand_types` and `outputs` are local types."""

    node: Node
    call: Call
    operands: tuple[Var, ...]
    operand_types: tuple[TensorType, ...]
    results: tuple[Var, ...]
    outputs: tuple[TensorType, ...]
    collectives: tuple[CollectiveUse, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TemplateProgram:
    """A template on one rank. `inputs`: Vars of INPUT nodes; `tensors`: those of PARAMETER, BUFFER, CONSTANT nodes."""

    template: Template
    inputs: tuple[Var, ...]
    tensors: tuple[Var, ...]
    steps: tuple[Convert | Compute, ...]
    outputs: tuple[Var, ...]

    def collectives(self) -> tuple[CollectiveUse, ...]:
        """Every collective of one unit in one microbatch, in program order."""
        found: list[CollectiveUse] = []
        for step in self.steps:
            found.extend(step.collectives if isinstance(step, Compute) else conversion_uses(step))
        return tuple(found)

    @cached_property
    def reads(self) -> tuple[frozenset[int], ...]:
        """For every output the positions of the inputs that it is computed from."""
        none: frozenset[int] = frozenset()
        found = {made: frozenset((position,)) for position, made in enumerate(self.inputs)}
        for step in self.steps:
            if isinstance(step, Convert):
                found[step.target] = found.get(step.source, none)
            else:
                inputs = none.union(*(found.get(operand, none) for operand in step.operands))
                found.update(dict.fromkeys(step.results, inputs))
        return tuple(found.get(made, none) for made in self.outputs)


def conversion_uses(step: Convert) -> tuple[CollectiveUse, ...]:
    # The size of the axis does not enter the payload; only its name does.
    return step.change.collectives(Axis(step.change.axis, 2))


def option_named(node: Node, operands: Sequence[TensorType], label: str) -> Option:
    """The option with this label.

    Raises:
        KeyError: the operation has no such option; the message lists what it has.
    """
    return _option_named(node, tuple(operands), label)


@lru_cache(maxsize=1 << 14)
def _option_named(node: Node, operands: tuple[TensorType, ...], label: str) -> Option:
    options = options_of(node, operands, frozenset((label_groups(label),)))
    for option in options:
        if option.label == label or (label == "grad" and option.label == "none" and len(options) == 1):
            return option
    if label == "grad":
        return options[0]
    raise KeyError(f"{node.name} ({node.op}) has no option {label!r}: {', '.join(o.label for o in options)}")


def node_layouts(
    template: Template, node: Node, placement: TemplatePlacement, axes: Sequence[Axis]
) -> tuple[list[dict[str, Pair]], list[dict[str, Pair]]]:
    """Layouts of the node's operands (as it wants them) and outputs (as it makes them).

    Raises:
        KeyError: the operation has no option with the label.
        CannotLower: a split does not divide, or cuts through the runs that another axis splits.
    """
    chosen = placement.get(node.name, {})
    operand_types = [template.type_of(ref) for ref in node.operands]
    wants: list[dict[str, Pair]] = [{} for _ in node.operands]
    makes: list[dict[str, Pair]] = [{} for _ in node.outputs]
    for axis in axes:
        if node.kind is not Kind.OP:
            makes[0][axis.name] = normal(parse_pair(chosen.get(axis.name, "R")), node.output.requires_grad)
            continue
        option = option_named(node, operand_types, chosen.get(axis.name, "none"))
        for place, pair, value in zip(wants, option.operands, operand_types, strict=True):
            place[axis.name] = normal(pair, value.requires_grad)
        for place, pair, value in zip(makes, option.outputs, node.outputs, strict=True):
            place[axis.name] = normal(pair, value.requires_grad)
    for layout, value in zip((*wants, *makes), (*operand_types, *node.outputs), strict=True):
        if not can_split(value, layout, axes):
            pairs = ", ".join(f"{axis.name}={axis.size}: {layout[axis.name]}" for axis in axes if axis.name in layout)
            raise CannotLower(f"{node.name}: shape {value.shape} cannot be split as {pairs}")
    return wants, makes


def local_program(template: Template, placement: TemplatePlacement, mesh: Mesh) -> TemplateProgram:
    """Lower one template.

    Raises:
        KeyError: a label that does not exist.
        CannotLower: a split that does not divide, a conversion that does not exist.
    """
    axes = mesh.axes
    sizes = {axis.name: axis.size for axis in axes}
    have: dict[Ref, list[Var]] = {}
    steps: list[Convert | Compute] = []
    inputs: list[Var] = []
    tensors: list[Var] = []

    def want(ref: Ref, layout: dict[str, Pair]) -> Var:
        target = var(ref, layout)
        if target in have[ref]:
            return target
        value = template.type_of(ref)
        made = have[ref][0]
        current = made
        for change in changes(value, made.layout, layout, axes):
            following = var(ref, {**current.layout, change.axis: change.target})
            if following not in have[ref]:
                steps.append(Convert(source=current, target=following, change=change))
                have[ref].append(following)
            current = following
        return current

    for node in template.nodes:
        wants, makes = node_layouts(template, node, placement, axes)
        results = tuple(var(Ref(node.name, i), layout) for i, layout in enumerate(makes))
        if node.kind is Kind.OP:
            operands = tuple(want(ref, layout) for ref, layout in zip(node.operands, wants, strict=True))
            steps.append(_compute(template, node, placement, axes, sizes, operands, results, wants, makes))
        elif node.kind is Kind.INPUT:
            inputs.append(results[0])
        else:
            tensors.append(results[0])
        for result in results:
            have[result.ref] = [result]
    outputs = tuple(have[ref][0] for ref in template.outputs)
    return TemplateProgram(
        template=template,
        inputs=tuple(inputs),
        tensors=tuple(tensors),
        steps=_with_gradients(template, steps, outputs),
        outputs=outputs,
    )


def _with_gradients(
    template: Template, steps: Sequence[Convert | Compute], outputs: Sequence[Var]
) -> tuple[Convert | Compute, ...]:
    """The steps, conversions of what is read without gradient alone (behind `detach`, by `argmax`) without backward."""
    reached, found = set(outputs), list[Convert | Compute]()
    for step in reversed(steps):
        if isinstance(step, Compute):
            sends = (made for i, made in enumerate(step.operands) if (step.node.name, i) in template.differentiated)
            reached.update(sends)
        elif step.target in reached:
            reached.add(step.source)
        else:
            change = step.change
            change = replace(change, before=without_gradient(change.before), after=without_gradient(change.after))
            step = replace(step, change=change)
        found.append(step)
    return tuple(reversed(found))


def _compute(
    template: Template,
    node: Node,
    placement: TemplatePlacement,
    axes: Sequence[Axis],
    sizes: Mapping[str, int],
    operands: tuple[Var, ...],
    results: tuple[Var, ...],
    wants: Sequence[Layout],
    makes: Sequence[Layout],
) -> Compute:
    operand_types = tuple(
        local_type(template.type_of(ref), layout, axes) for ref, layout in zip(node.operands, wants, strict=True)
    )
    outputs = tuple(local_type(value, layout, axes) for value, layout in zip(node.outputs, makes, strict=True))
    chosen = placement.get(node.name, {})
    labels = {axis.name: chosen.get(axis.name, "none") for axis in axes}
    rule = rule_of(node.op)
    if rule is None:
        return Compute(
            node=node, call=same_call(node, labels, outputs, sizes), operands=operands, operand_types=operand_types,
            results=results, outputs=outputs, labels=tuple(labels.items()),
        )  # fmt: skip
    uses: list[CollectiveUse] = []
    for axis in axes:
        uses.extend(rule.collectives(node, labels[axis.name], axis.name, axis.size, operand_types, outputs))
    return Compute(
        node=node,
        call=rule.localise(node, labels, outputs, sizes),
        operands=operands,
        operand_types=operand_types,
        results=results,
        outputs=outputs,
        collectives=tuple(uses),
        labels=tuple(labels.items()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProgram:
    """All templates lowered, and the conversions on the way from one unit to the next."""

    graph: ModelGraph
    mesh: Mesh
    templates: tuple[TemplateProgram, ...]

    def edge(self, unit: int, position: int) -> tuple[Value, tuple[Change, ...]]:
        """Where input `position` of `unit` comes from and the conversions that the receiver of the value runs."""
        value = self.graph.units[unit].inputs[position]
        source = self.templates[self.graph.units[value.unit].template].outputs[value.output].layout
        target = self.templates[self.graph.units[unit].template].inputs[position].layout
        return value, changes(self._read_type(unit, position), source, target, self.mesh.axes)

    def _read_type(self, unit: int, position: int) -> TensorType:
        """Global; with gradient where the unit sends one."""
        program = self.templates[self.graph.units[unit].template]
        return program.template.type_of(program.inputs[position].ref)

    def prepared(self, unit: int, position: int) -> tuple[Change, ...]:
        """The conversions of a prelude value that run once a step, before the microbatches take their slices of it."""
        return self._received(unit, position)[0]

    def in_microbatch(self, unit: int, position: int) -> tuple[Change, ...]:
        """The conversions at an input that every microbatch runs, of a prelude value those that follow its slice."""
        return self._received(unit, position)[1]

    def _received(self, unit: int, position: int) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
        value, found = self.edge(unit, position)
        if value.unit:
            return (), found
        source = self.templates[self.graph.units[0].template].outputs[value.output].layout
        target = self.templates[self.graph.units[unit].template].inputs[position].layout
        unsliced = {axis: pair for axis, pair in target.items() if axis != MICROBATCH}
        unsliced |= {MICROBATCH: source[MICROBATCH]} if MICROBATCH in source else {}
        kind = self.graph.type_of(value)
        try:
            once = changes(kind, source, unsliced, self.mesh.axes)
            sliced = changes(kind, unsliced, target, self.mesh.axes)
        except CannotLower:
            pass
        else:
            if all(change.axis == MICROBATCH for change in sliced):
                return once, ()
        # Axes on both sides of the microbatches split one dim: each conversion in its place.
        at = next((i for i, change in enumerate(found) if change.axis == MICROBATCH), None)
        return ((), found) if at is None else (found[:at], found[at + 1 :])


def model_program(graph: ModelGraph, placements: Placements, mesh: Mesh) -> ModelProgram:
    """Lower every template.

    Raises:
        KeyError, CannotLower: as `local_program`.
    """
    programs = tuple(
        local_program(template, placement, mesh)
        for template, placement in zip(graph.templates, placements, strict=True)
    )
    return ModelProgram(graph=graph, mesh=mesh, templates=programs)
