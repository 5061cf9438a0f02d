"""Folded graph + mesh axes -> the op-level integer program, and its answer back as placements.

One vertex per node of every template (tied parameters share one), states are the pairs of a value on every axis of the
mesh. Axes that are not free keep the labels they have, so the same code serves one axis after the other and all axes
at once. What the axes force (docs/design.md, "Placements"):

| | microbatch | dp | ep | cp | tp |
|---|---|---|---|---|---|
| model input | R | S(batch) | R | R | R |
| parameter | R/P | R/P | R/P, S of experts | R/P | R, R/P, S |
| buffer, constant | R | R | R | R | R, S (buffers) |
| factor of an operation | batch, none in the prelude | batch | batch, experts | any but batch | any but batch |
| conversion | identity; R -> S of prelude values | any | any | any | any |
| loss | P/R | R, P/R | R, P/R | R, P/R | R, P/R |

Beside its factors an operation may always be "none", "grad" or "partial"; on microbatch it has no inner collectives.
On tp a matrix (a parameter of two dims) is split wherever it can be: split tokens over whole matrices are context
parallelism, cp. On ep parameters made of experts (`experts.py`) are split wherever they can be: whole ones beside split
samples are data parallelism, dp. On cp an operation that splits a parameter splits all that it reads and makes (a
table of positions added to tokens). On ep and cp an operation that reads a matrix of parameters splits something if it
can: these axes are there to share work, of which short steps would rather have none shared. No parameter is gathered
but over dp: FSDP does that, ahead of time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Protocol

from ..capture.graph import Kind, ModelGraph, Node, Ref, Template, TensorType, Value
from ..sharding.mesh import MICROBATCH, Axis
from ..sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Pair, can_split, local_type, normal, split
from ..sharding.program import Placements
from ..sharding.redistribute import COLLECTIVES, conversion, has_conversion
from ..sharding.rules import Option, interesting_groups, label_groups, options_of, plain_label
from .assignment import Assignment, Choice, Group, Problem
from .experts import EXPERT_DIMS, Edge, Experts, find_experts

Labels = tuple[str, ...]  # one per axis
State = tuple[Pair, ...]  # one per axis

# Operations that write into an operand: that operand must be the stored buffer itself, never a converted copy.
_WRITES_OPERANDS = ("aten.batch_norm.default",)
_UNSPLIT = ("none", "grad")
_MATRIX_DIMS = 2


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


@dataclass(frozen=True)
class Space:
    """What is common to every mesh: options, edges between templates, counts and ties of a graph."""

    graph: ModelGraph
    counts: tuple[int, ...] = field(init=False)
    prelude: int = field(init=False)
    even_parts: dict[int, bool] = field(default_factory=dict, init=False)  # known answers, see `candidates.py`

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", self.graph.counts())
        object.__setattr__(self, "prelude", self.graph.units[0].template)

    @cached_property
    def options(self) -> dict[tuple[int, str], tuple[Option, ...]]:
        found = {}
        for t, template in enumerate(self.graph.templates):
            groups = interesting_groups(template)
            for node in template.of_kind(Kind.OP):
                found[t, node.name] = options_of(node, [template.type_of(ref) for ref in node.operands], groups)
        return found

    @cached_property
    def experts(self) -> Experts:
        return find_experts(self.graph, self.options, self.edges)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        counts: dict[tuple[int, int, int, str], int] = {}
        for unit in self.graph.units:
            inputs = self.graph.templates[unit.template].of_kind(Kind.INPUT)
            for node, value in zip(inputs, unit.inputs, strict=False):
                key = (self.graph.units[value.unit].template, value.output, unit.template, node.name)
                counts[key] = counts.get(key, 0) + 1
        return tuple(Edge(*key, count) for key, count in counts.items())

    @cached_property
    def reads(self) -> Counter[Value]:
        """How often units read every value."""
        return Counter(value for unit in self.graph.units for value in unit.inputs)

    @cached_property
    def holders(self) -> dict[tuple[int, str], tuple[str, ...]]:
        """FQNs of every PARAMETER and BUFFER node, over all units of its template."""
        found: dict[tuple[int, str], dict[str, None]] = {}
        for unit in self.graph.units:
            for name, fqn in unit.tensors:
                found.setdefault((unit.template, name), {})[fqn] = None
        return {key: tuple(fqns) for key, fqns in found.items()}

    @cached_property
    def tied(self) -> dict[tuple[int, str], tuple[int, str]]:
        """For every PARAMETER and BUFFER node the first node that holds one of its tensors, itself included."""
        first: dict[str, tuple[int, str]] = {}
        found: dict[tuple[int, str], tuple[int, str]] = {}
        for key, fqns in self.holders.items():
            root = next((first[fqn] for fqn in fqns if fqn in first), key)
            found[key] = root
            for fqn in fqns:
                first.setdefault(fqn, root)
        return found

    @cached_property
    def asked(self) -> dict[tuple[int, Ref], tuple[Pair, ...]]:
        """Pairs that some operation wants or makes of a value, first seen first."""
        found: dict[tuple[int, Ref], dict[Pair, None]] = {}
        for (t, name), options in self.options.items():
            node = self.graph.templates[t].by_name[name]
            for option in options:
                for ref, pair in zip(node.operands, option.operands, strict=True):
                    found.setdefault((t, ref), {})[pair] = None
                for index, pair in enumerate(option.outputs):
                    found.setdefault((t, Ref(name, index)), {})[pair] = None
        return {key: tuple(pairs) for key, pairs in found.items()}

    @cached_property
    def crossing(self) -> dict[tuple[int, str], tuple[Pair, ...]]:
        """Pairs worth having at every INPUT node: those its readers want and its sources make."""
        found: dict[tuple[int, str], dict[Pair, None]] = {}
        for t, template in enumerate(self.graph.templates):
            for node in template.of_kind(Kind.INPUT):
                found[t, node.name] = dict.fromkeys(self.asked.get((t, Ref(node.name)), ()))
        # A value that passes through a template unread takes what the next template wants: as many rounds as hops.
        for _ in self.graph.templates:
            for edge in self.edges:
                ref = self.graph.templates[edge.source].outputs[edge.output]
                into = found[edge.target, edge.node]
                into.update(dict.fromkeys(self.asked.get((edge.source, ref), ())))
                if (edge.source, ref.node) in found and edge.source != self.prelude:
                    found[edge.source, ref.node].update(dict.fromkeys(into))
        return {key: tuple(pairs) for key, pairs in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is allowed beside the table above. `batch` holds the label of every node that splits the batch.

    `whole`: parameters, as (template, node), that tp does not split.
    """

    batch: Placements | None = None
    tp_may_split_batch: bool = False
    whole: frozenset[tuple[int, str]] = frozenset()


def tensor_pairs(space: Space, template: int, node: Node, axis: Axis, rules: Rules) -> list[Pair]:
    """Pairs that an INPUT, PARAMETER, BUFFER or CONSTANT may have on an axis."""
    trainable = node.output.requires_grad
    if node.kind is Kind.INPUT and template == space.prelude:
        names = [n.name for n in space.graph.templates[template].of_kind(Kind.INPUT)]
        batch_dim = space.graph.inputs[names.index(node.name)].batch_dim
        return [split(batch_dim) if axis.name == "dp" and batch_dim is not None else REPLICATED]
    if node.kind is Kind.INPUT:
        pairs = [*space.crossing[template, node.name], REPLICATED]
        if not trainable:  # of two ways that cost the same, add up what the inputs give before microbatches take it
            pairs.sort(key=lambda pair: pair == PARTIAL)
        return list(dict.fromkeys(normal(pair, trainable) for pair in pairs))
    if axis.name == "ep":
        experts = [pair for pair in space.experts.tensors.get((template, node.name), ()) if pair.groups == 1]
        divisible = [pair for pair in experts if can_split(node.output, {axis.name: pair}, (axis,))]
        must_split = divisible and len(node.output.shape) >= EXPERT_DIMS
        return divisible if must_split else [normal(SUMMED_GRADIENT, trainable), *divisible]
    if axis.name != "tp" or (template, node.name) in rules.whole:
        return [normal(SUMMED_GRADIENT, trainable)]
    asked = [pair for pair in space.asked.get((template, Ref(node.name)), ()) if pair.is_split]
    if node.kind is Kind.PARAMETER and len(node.output.shape) == _MATRIX_DIMS:
        divisible = [pair for pair in asked if can_split(node.output, {axis.name: pair}, (axis,))]
        if divisible:
            return divisible
    if node.kind is Kind.PARAMETER:
        return list(dict.fromkeys(normal(p, trainable) for p in (REPLICATED, SUMMED_GRADIENT, *asked)))
    # A buffer that the step replaces is written by one statement on every rank: it is held whole.
    is_replaced = any(node.name == name for name, _ in space.graph.templates[template].buffer_updates)
    return [REPLICATED, *asked] if node.kind is Kind.BUFFER and not is_replaced else [REPLICATED]


def operation_options(space: Space, template: int, node: Node, axis: Axis, rules: Rules) -> list[Option]:
    """Options that an operation may take on an axis."""
    options = list(space.options[template, node.name])
    batch = None if rules.batch is None else rules.batch[template].get(node.name, {}).get(MICROBATCH, "none")
    is_prelude = template == space.prelude
    if axis.name == MICROBATCH:
        return options[:1] if is_prelude else [option for option in options if not option.runs_collectives]
    if axis.name == "dp" and batch is not None and not is_prelude:
        return [o for o in options if o.label in _UNSPLIT or o.label == batch or o.label.startswith("partial")]
    if axis.name == "ep" and not is_prelude:
        named = {*_UNSPLIT, *({batch} if batch else ()), *space.experts.labels.get((template, node.name), ())}
        options = [o for o in options if o.label in named or o.label.startswith("partial")]
        return _split_with_matrices(space, template, node, axis, options)
    may_split_batch = axis.name == "tp" and rules.tp_may_split_batch
    if axis.name in ("cp", "tp") and batch not in (None, *_UNSPLIT) and not may_split_batch:
        options = [o for o in options if not _splits_batch(o.label, batch, space.graph.batch_size)]
    if axis.name == "cp" and not is_prelude:
        options = [option for option in options if _keeps_parameters(space, template, node, option)]
        return _split_with_matrices(space, template, node, axis, options)
    return options


def reads_matrix(template: Template, node: Node) -> bool:
    """Whether an operation reads a parameter of two or more dims itself."""
    return any(
        template.by_name[ref.node].kind is Kind.PARAMETER and len(template.type_of(ref).shape) >= _MATRIX_DIMS
        for ref in node.operands
    )


def _splits_batch(label: str, batch: str, batch_size: int) -> bool:
    """Whether a label parts samples from each other as `batch` does; runs as short as one sample keep each whole."""
    if label.startswith("partial") or plain_label(label) != plain_label(batch):
        return False
    return label_groups(label) % (label_groups(batch) * batch_size) != 0


def _split_with_matrices(
    space: Space, template: int, node: Node, axis: Axis, options: Sequence[Option]
) -> list[Option]:
    """The options that split something if the operation reads a matrix (or more) of parameters and one divides."""
    if not reads_matrix(space.graph.templates[template], node):
        return list(options)
    values = (*(space.graph.templates[template].type_of(ref) for ref in node.operands), *node.outputs)
    divisible = [
        option
        for option in options
        if option.label not in _UNSPLIT
        and not option.label.startswith("partial")
        and option.extent % axis.size == 0
        and all(
            can_split(value, {axis.name: pair}, (axis,))
            for value, pair in zip(values, (*option.operands, *option.outputs), strict=True)
        )
    ]
    return divisible or list(options)


def _keeps_parameters(space: Space, template: int, node: Node, option: Option) -> bool:
    """Whether an option reads parameters whole, or splits all that it reads and makes."""
    nodes = space.graph.templates[template].by_name
    pairs = zip(node.operands, option.operands, strict=True)
    if not any(pair.is_split and nodes[ref.node].kind is Kind.PARAMETER for ref, pair in pairs):
        return True
    return all(pair.is_split for pair in (*option.operands, *option.outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A problem, who its vertices are, and how to read an answer."""

    problem: Problem
    keys: tuple[tuple[tuple[int, str], ...], ...]  # nodes of every vertex
    axes: tuple[Axis, ...]

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
            self._add_group(edge.source, ref, (consumer,), weight, crosses=True)
        names = tuple(f"{self.space.graph.templates[t].name}: {name}" for (t, name), *_ in self.keys)
        problem = Problem(names=names, choices=tuple(tuple(c) for c in self.choices), groups=tuple(self.groups))
        return Built(problem=problem, keys=tuple(tuple(keys) for keys in self.keys), axes=self.axes)

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
            self._add_group(t, ref, consumers, self._weight(t), identity_only=is_written)
        for position, (buffer, ref) in enumerate(template.buffer_updates):
            earlier = sum(name == buffer for name, _ in template.buffer_updates[:position])
            self._add_group(t, ref, ((self.vertex[t, buffer], earlier),), 1.0, identity_only=True)

    def _add_group(
        self,
        t: int,
        ref: Ref,
        consumers: tuple[tuple[int, int], ...],
        weight: float,
        *,
        crosses: bool = False,
        identity_only: bool = False,
    ) -> None:
        value = self.space.graph.templates[t].type_of(ref)
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
