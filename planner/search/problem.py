"""Folded graph + mesh axes -> the op-level integer program, and its answer back as placements.

One vertex per node of every template (tied parameters share one), states are the pairs of a value on every axis of the
mesh. Axes that are not free keep the labels they have, so the same code serves one axis after the other and all axes
at once. What axes allow is in `space.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from ..capture.graph import Kind, ModelGraph, Node, Ref, TensorType, without_gradient
from ..sharding.mesh import Axis
from ..sharding.placement import PARTIAL, REPLICATED, Pair, can_split, local_type, normal
from ..sharding.program import Placements
from ..sharding.redistribute import COLLECTIVES, conversion, has_conversion
from ..sharding.rules import Option
from .assignment import Assignment, Choice, Group, Problem
from .space import Rules, Space, operation_options, tensor_pairs

Labels = tuple[str, ...]  # one per axis
State = tuple[Pair, ...]  # one per axis

# Operations that write into an operand: that operand must be the stored buffer itself, never a converted copy.
_WRITES_OPERANDS = ("aten.batch_norm.default",)


class Costs(Protocol):
    """What the integer program pays; all amounts are per run of the node, in seconds and bytes."""

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        """Of a local operation in one microbatch."""
        ...

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        """Of holding a parameter or buffer, in a step."""
        ...

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        """Of a change of state in one microbatch, both directions; None: there is no such conversion."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A problem, who its vertices are, and how to read an answer."""

    problem: Problem
    keys: tuple[tuple[tuple[int, str], ...], ...]  # nodes of every vertex
    axes: tuple[Axis, ...]
    moved: tuple[TensorType, ...]  # what conversions of every group carry, global

    def placements(self, space: Space, assignment: Assignment) -> Placements:
        return self.read(len(space.graph.templates), assignment.chosen)

    def read(self, num_templates: int, chosen: Sequence[int]) -> Placements:
        """The placements that positions of choices stand for."""
        found: list[dict[str, dict[str, str]]] = [{} for _ in range(num_templates)]
        for keys, choices, k in zip(self.keys, self.problem.choices, chosen, strict=True):
            labels = choices[k].label
            assert isinstance(labels, tuple)
            named = {a.name: label for a, label in zip(self.axes, labels, strict=True) if label not in ("none", "R")}
            if named:
                for template, name in keys:
                    found[template][name] = dict(named)
        return tuple(found)


def build_problem(
    space: Space,
    axes: Sequence[Axis],
    free: Sequence[str],
    fixed: Placements,
    rules: Rules,
    costs: Costs,
    microbatches: int,
) -> Built:
    """The program over `axes`, of which `free` are decided now and the others are as in `fixed`."""
    builder = _Builder(space, tuple(axes), frozenset(free), fixed, rules, costs, microbatches)
    return builder.build()


class _Builder:
    def __init__(
        self,
        space: Space,
        axes: tuple[Axis, ...],
        free: frozenset[str],
        fixed: Placements,
        rules: Rules,
        costs: Costs,
        microbatches: int,
    ) -> None:
        self.space, self.axes, self.free, self.fixed = space, axes, free, fixed
        self.rules, self.costs, self.microbatches = rules, costs, microbatches
        self.keys: list[list[tuple[int, str]]] = []
        self.choices: list[list[Choice]] = []
        self.vertex: dict[tuple[int, str], int] = {}
        self.groups: list[Group] = []
        self.moved: list[TensorType] = []

    def build(self) -> Built:
        for t, template in enumerate(self.space.graph.templates):
            for node in template.nodes:
                self._add_vertex(t, node)
        self._restrict_loss()
        for t in range(len(self.space.graph.templates)):
            self._add_template_groups(t)
        for edge in self.space.edges:
            ref = self.space.graph.templates[edge.source].outputs[edge.output]
            consumer = (self.vertex[edge.target, edge.node], 0)
            # What the prelude makes is converted once a step, before microbatches take their slices.
            weight = edge.count * (1 if edge.source == self.space.prelude else self.microbatches)
            value = self.space.graph.templates[edge.target].by_name[edge.node].output
            self._add_group(edge.source, ref, (consumer,), weight, value=value, crosses=True)
        names = tuple(f"{self.space.graph.templates[t].name}: {name}" for (t, name), *_ in self.keys)
        problem = Problem(names=names, choices=tuple(tuple(c) for c in self.choices), groups=tuple(self.groups))
        keys = tuple(tuple(keys) for keys in self.keys)
        return Built(problem=problem, keys=keys, axes=self.axes, moved=tuple(self.moved))

    def _weight(self, template: int) -> float:
        if template == self.space.prelude:
            return 1.0
        return float(self.space.counts[template] * self.microbatches)

    def _add_vertex(self, t: int, node: Node) -> None:
        key = (t, node.name)
        root = self.space.tied.get(key, key)
        if root != key:
            # The tie also joins what the consumers of both ask for.
            index = self.vertex[key] = self.vertex[root]
            self.keys[index].append(key)
            have = {choice.label for choice in self.choices[index]}
            self.choices[index].extend(c for c in self._tensor_choices(t, node) if c.label not in have)
            return
        self.vertex[key] = len(self.keys)
        self.keys.append([key])
        made = self._operation_choices(t, node) if node.kind is Kind.OP else self._tensor_choices(t, node)
        self.choices.append(list(made))

    def _fixed_label(self, t: int, name: str, axis: Axis, default: str) -> str:
        return self.fixed[t].get(name, {}).get(axis.name, default)

    def _tensor_choices(self, t: int, node: Node) -> Iterator[Choice]:
        value = node.output
        per_axis: list[list[Pair]] = []
        for axis in self.axes:
            pairs = tensor_pairs(self.space, t, node, axis, self.rules)
            if axis.name not in self.free:
                label = self._fixed_label(t, node.name, axis, "R")
                pairs = [pair for pair in pairs if str(pair) == label]
            per_axis.append(pairs)
        count = len(self.space.holders.get((t, node.name), ())) or self.space.counts[t]
        updates = sum(name == node.name for name, _ in self.space.graph.templates[t].buffer_updates)
        for state in product(*per_axis):
            layout = self._layout(state)
            if not can_split(value, layout, self.axes) or (node.kind is Kind.PARAMETER and _cuts_runs_twice(state)):
                continue
            seconds, size = 0.0, 0.0
            if node.kind in (Kind.PARAMETER, Kind.BUFFER):
                seconds, size = self.costs.tensor(node, state, local_type(value, layout, self.axes))
            is_input = node.kind is Kind.INPUT and t != self.space.prelude
            yield Choice(
                label=tuple(map(str, state)),
                outputs=(state,),
                operands=(state,) * (1 if is_input else updates),
                cost_seconds=seconds * count,
                memory_bytes=size * count,
            )

    def _operation_choices(self, t: int, node: Node) -> Iterator[Choice]:
        template = self.space.graph.templates[t]
        operand_types = [template.type_of(ref) for ref in node.operands]
        per_axis: list[list[Option]] = []
        for axis in self.axes:
            options = operation_options(self.space, t, node, axis, self.rules)
            if axis.name not in self.free:
                label = self._fixed_label(t, node.name, axis, "none")
                options = [option for option in options if option.label == label]
            else:
                options = [option for option in options if option.extent % axis.size == 0]
            per_axis.append(options)
        weight = self._weight(t)
        for options in product(*per_axis):
            if not self._divides(options):
                continue
            wants = [
                tuple(normal(option.operands[j], value.requires_grad) for option in options)
                for j, value in enumerate(operand_types)
            ]
            makes = [
                tuple(normal(option.outputs[i], value.requires_grad) for option in options)
                for i, value in enumerate(node.outputs)
            ]
            layouts = [self._layout(state) for state in (*wants, *makes)]
            values = (*operand_types, *node.outputs)
            if not all(can_split(v, layout, self.axes) for v, layout in zip(values, layouts, strict=True)):
                continue
            local = [local_type(v, layout, self.axes) for v, layout in zip(values, layouts, strict=True)]
            labels = tuple(option.label for option in options)
            count = len(operand_types)
            seconds, size = self.costs.operation(t, node, labels, local[:count], local[count:])
            yield Choice(
                label=labels,
                outputs=tuple(makes),
                operands=tuple(wants),
                cost_seconds=seconds * weight,
                memory_bytes=0.0 if t == self.space.prelude else size * self.space.counts[t],
            )

    def _divides(self, options: Sequence[Option]) -> bool:
        """Whether an option's extent holds all axes that take the same label."""
        for option in options:
            together = 1
            takers = 0
            for axis, other in zip(self.axes, options, strict=True):
                if other.label == option.label:
                    together *= axis.size
                    takers += 1
            if option.extent and option.extent % together:
                return False
            if option.one_axis and takers > 1:
                return False
        return True

    def _layout(self, state: Sequence[Pair]) -> dict[str, Pair]:
        return {axis.name: pair for axis, pair in zip(self.axes, state, strict=True)}

    def _restrict_loss(self) -> None:
        loss = self.space.graph.loss
        t = self.space.graph.units[loss.unit].template
        ref = self.space.graph.templates[t].outputs[loss.output]
        vertex = self.vertex[t, ref.node]
        self.choices[vertex] = [
            choice
            for choice in self.choices[vertex]
            if all(
                pair == PARTIAL or (pair == REPLICATED and not axis.is_time)
                for axis, pair in zip(self.axes, state_of(choice.outputs[ref.index]), strict=True)
            )
        ]

    def _add_template_groups(self, t: int) -> None:
        template = self.space.graph.templates[t]
        for ref, readers in template.consumers().items():
            consumers = tuple((self.vertex[t, name], position) for name, position in readers)
            is_written = template.by_name[ref.node].kind is Kind.BUFFER and any(
                template.by_name[name].op in _WRITES_OPERANDS for name, _ in readers
            )
            value = self._moved(t, ref, readers)
            self._add_group(t, ref, consumers, self._weight(t), value=value, identity_only=is_written)
        for position, (buffer, ref) in enumerate(template.buffer_updates):
            earlier = sum(name == buffer for name, _ in template.buffer_updates[:position])
            updated = ((self.vertex[t, buffer], earlier),)
            self._add_group(t, ref, updated, 1.0, value=template.type_of(ref), identity_only=True)

    def _moved(self, t: int, ref: Ref, readers: Sequence[tuple[str, int]]) -> TensorType:
        """A value as its conversions see it: without gradient where some reader sends none, which takes no more."""
        template = self.space.graph.templates[t]
        value = template.type_of(ref)
        return value if all(reader in template.differentiated for reader in readers) else without_gradient(value)

    def _add_group(
        self,
        t: int,
        ref: Ref,
        consumers: tuple[tuple[int, int], ...],
        weight: float,
        *,
        value: TensorType,
        crosses: bool = False,
        identity_only: bool = False,
    ) -> None:
        producer = (self.vertex[t, ref.node], ref.index)
        made = dict.fromkeys(state_of(choice.outputs[ref.index]) for choice in self.choices[producer[0]])
        wanted = dict.fromkeys(state_of(c.operands[j]) for n, j in consumers for c in self.choices[n])
        may_slice = crosses and t == self.space.prelude
        is_parameter = self.space.graph.templates[t].by_name[ref.node].kind is Kind.PARAMETER
        prices: dict[tuple[Hashable, Hashable], float] = {}
        for source in made:
            for target in wanted:
                if source == target:
                    prices[source, target] = 0.0
                elif identity_only or not self._keeps_time(source, target, may_slice):
                    continue
                elif not (is_parameter and self._gathers(source, target)):
                    price = self.costs.conversion(value, source, target)
                    if price is not None:
                        prices[source, target] = price
        self.moved.append(value)
        self.groups.append(Group(producer=producer, consumers=consumers, weight=weight, prices=prices))

    def _gathers(self, source: State, target: State) -> bool:
        """Whether a parameter would be communicated in every microbatch."""
        for axis, p, r in zip(self.axes, source, target, strict=True):
            if not axis.is_time and p != r:
                found = conversion(p, r) if has_conversion(p, r) else None
                if found is None or found.forward in COLLECTIVES or found.backward in COLLECTIVES:
                    return True
        return False

    def _keeps_time(self, source: State, target: State, may_slice: bool) -> bool:
        """On the microbatch axis nothing changes, but that the loop slices what the prelude made."""
        for axis, p, r in zip(self.axes, source, target, strict=True):
            if axis.is_time and p != r and not (may_slice and p == REPLICATED and r.is_split):
                return False
        return True


def _cuts_runs_twice(state: State) -> bool:
    """Whether a dim of several runs is split by two axes: a parameter held with the runs apart could not say so."""
    dims = [pair.dim for pair in state if pair.is_split]
    return any(pair.is_split and pair.groups > 1 and dims.count(pair.dim) > 1 for pair in state)


def state_of(state: object) -> State:
    """A state of `Choice`, which leaves open what states are, as a pair per axis."""
    assert isinstance(state, tuple)
    return state


def empty_placements(graph: ModelGraph) -> Placements:
    empty: Mapping[str, Mapping[str, str]] = {}
    return tuple(empty for _ in graph.templates)
