"""Which parameters of a model are made of experts, and which factors of its operations run over them.

An expert is a slice of a parameter of three or more dims that a product reads beside its own slice of everything else:
the product has a factor that all its operands and results share (the batch of a batched product). From there the factor
is followed to every operation that splits the same dim of the same value. Nothing is known of names: layers that are
stacked in one parameter and run side by side are experts as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..capture.graph import Kind, ModelGraph, Node, Ref, Template
from ..sharding.placement import Pair
from ..sharding.rules import Option, rule_of

EXPERT_DIMS = 3  # of a parameter: experts, and the two dims of a matrix


@dataclass(frozen=True, slots=True)
class Edge:
    """Output `output` of template `source` feeds input node `node` of template `target` in `count` pairs of units."""

    source: int
    output: int
    target: int
    node: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """By (template, node): labels of operations that split experts, pairs of parameters that do.

    `counts`: how many experts the parameters are made of.
    """

    labels: Mapping[tuple[int, str], frozenset[str]] = field(default_factory=dict)
    tensors: Mapping[tuple[int, str], tuple[Pair, ...]] = field(default_factory=dict)
    counts: frozenset[int] = frozenset()


Options = Mapping[tuple[int, str], Sequence[Option]]
_Split = tuple[int, Ref, Pair]  # a value of a template, split


def find_experts(graph: ModelGraph, options: Options, edges: Sequence[Edge]) -> Experts:
    """Follow the factors of expert parameters through the graph."""
    splits: set[_Split] = set()
    counts: set[int] = set()
    for (t, name), found in options.items():
        template = graph.templates[t]
        node = template.by_name[name]
        if _is_product(template, node):
            for option in _splitting(found):
                held = _held_experts(graph, options, t, node, option)
                counts.update(held.values())
                if held:
                    splits.update(held, _splits(t, node, option))
    labels: dict[tuple[int, str], set[str]] = {}
    size = -1
    while splits and len(splits) != size:
        size = len(splits)
        for (t, name), found in options.items():
            node = graph.templates[t].by_name[name]
            for option in _splitting(found):
                mine = _splits(t, node, option)
                if not splits.isdisjoint(mine):
                    labels.setdefault((t, name), set()).add(option.label)
                    splits.update(mine)
        for edge in edges:
            source, target = graph.templates[edge.source].outputs[edge.output], Ref(edge.node)
            for t, ref, pair in tuple(splits):
                if (t, ref) == (edge.source, source):
                    splits.add((edge.target, target, pair))
                elif (t, ref) == (edge.target, target):
                    splits.add((edge.source, source, pair))
    tensors: dict[tuple[int, str], list[Pair]] = {}
    for t, ref, pair in sorted(splits, key=lambda item: (item[0], item[1].node, item[1].index, str(item[2]))):
        if graph.templates[t].by_name[ref.node].kind is Kind.PARAMETER:
            tensors.setdefault((t, ref.node), []).append(pair)
    return Experts(
        labels={key: frozenset(found) for key, found in labels.items()},
        tensors={key: tuple(pairs) for key, pairs in tensors.items()},
        counts=frozenset(counts),
    )


def _is_product(template: Template, node: Node) -> bool:
    rule = rule_of(node.op)
    if rule is None or len(node.operands) < 2:
        return False
    return bool(rule.work(node, [template.type_of(ref) for ref in node.operands], node.outputs).forward.gemms)


def _splitting(options: Sequence[Option]) -> Iterator[Option]:
    """Those that can split something: runs of length one leave nothing to split."""
    return (option for option in options if option.extent != 1)


def _splits(t: int, node: Node, option: Option) -> list[_Split]:
    read = [(t, ref, pair) for ref, pair in zip(node.operands, option.operands, strict=True) if pair.is_split]
    made = [(t, Ref(node.name, i), pair) for i, pair in enumerate(option.outputs) if pair.is_split]
    return [*read, *made]


def _held_experts(graph: ModelGraph, options: Options, t: int, node: Node, option: Option) -> dict[_Split, int]:
    """The splits of parameters that an option of a product runs over side by side with all else, and their sizes."""
    if not all(pair.is_split for pair in (*option.operands, *option.outputs)):
        return {}
    found: dict[_Split, int] = {}
    for ref, pair in zip(node.operands, option.operands, strict=True):
        if (source := _parameter_split(graph.templates[t], options, t, ref, pair)) is not None:
            parameter = graph.templates[t].type_of(source[1])
            if len(parameter.shape) >= EXPERT_DIMS and source[2].groups == 1:
                found[source] = parameter.shape[source[2].dim]
    return found


def _parameter_split(template: Template, options: Options, t: int, ref: Ref, pair: Pair) -> _Split | None:
    """The parameter that a value is a view of, split as `pair` splits the value; None where it is none."""
    while (node := template.by_name[ref.node]).kind is Kind.OP:
        if len(node.operands) != 1:
            return None
        before = [option.operands[0] for option in options[t, node.name] if option.outputs[ref.index] == pair]
        if not before or not before[0].is_split:
            return None
        ref, pair = node.operands[0], before[0]
    return (t, ref, pair) if node.kind is Kind.PARAMETER else None
