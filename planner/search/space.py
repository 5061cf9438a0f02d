"""What every mesh of a graph has in common, and what its axes allow: the pairs of values, the options of operations.

What the axes force (docs/design.md, "Placements"):

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..capture.graph import Kind, ModelGraph, Node, Ref, Template, Value
from ..sharding.mesh import MICROBATCH, Axis
from ..sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Pair, can_split, normal, split
from ..sharding.program import Placements
from ..sharding.rules import Option, interesting_groups, label_groups, options_of, plain_label
from .experts import EXPERT_DIMS, Edge, Experts, find_experts

_UNSPLIT = ("none", "grad")
_MATRIX_DIMS = 2


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
