"""Work and depth of a captured step, and Brent's bounds on its time on p processors.

W is the sum of all operations, D the longest path of dependent ones, in whatever unit the caller's cost function counts
(flops, seconds): max(W / p, D) <= T_p <= W / p + D. Folded units are multiplied out without being expanded.
Source: R. P. Brent, The parallel evaluation of general arithmetic expressions, JACM 21 (1974), lemma 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .graph import Kind, ModelGraph, Node, Ref, Template, TensorType, Value

# (node, operand types) -> cost of its forward and of its backward
NodeCost = Callable[[Node, tuple[TensorType, ...]], tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDepth:
    """Totals of one step, forward and backward, in the unit of the cost function."""

    forward_work: float
    backward_work: float
    forward_depth: float
    backward_depth: float

    @property
    def work(self) -> float:
        return self.forward_work + self.backward_work

    @property
    def depth(self) -> float:
        """The backward starts when the loss is there, so the two depths add up."""
        return self.forward_depth + self.backward_depth

    @property
    def average_parallelism(self) -> float:
        return self.work / self.depth if self.depth else 0.0

    def brent_bounds(self, num_processors: int) -> tuple[float, float]:
        """Least and greatest time of a greedy schedule on this many processors."""
        if num_processors < 1:
            raise ValueError(f"needs at least one processor, got {num_processors}")
        share = self.work / num_processors
        return max(share, self.depth), share + self.depth


def analyse(graph: ModelGraph, cost: NodeCost) -> WorkDepth:
    """Work and depth of a step with these costs per operation."""
    costs = [_costs(template, cost) for template in graph.templates]
    counts = graph.counts()
    totals = [
        sum(count * sum(pair[way] for pair in found.values()) for found, count in zip(costs, counts, strict=True))
        for way in (0, 1)
    ]
    depths = [_depth(graph, [{name: pair[way] for name, pair in found.items()} for found in costs]) for way in (0, 1)]
    return WorkDepth(forward_work=totals[0], backward_work=totals[1], forward_depth=depths[0], backward_depth=depths[1])


def _costs(template: Template, cost: NodeCost) -> dict[str, tuple[float, float]]:
    return {
        node.name: cost(node, tuple(template.type_of(ref) for ref in node.operands))
        for node in template.of_kind(Kind.OP)
    }


def _depth(graph: ModelGraph, weights: list[dict[str, float]]) -> float:
    """The heaviest path that ends at the loss. The same path, walked back, is the depth of the backward."""
    paths = [_paths(template, weight) for template, weight in zip(graph.templates, weights, strict=True)]
    arrival: dict[Value, float] = {}
    for number, unit in enumerate(graph.units):
        template = graph.templates[unit.template]
        inside, through = paths[unit.template]
        for index, ref in enumerate(template.outputs):
            ends = [arrival[value] + through[ref][i] for i, value in enumerate(unit.inputs) if i in through[ref]]
            arrival[Value(number, index)] = max([inside[ref], *ends])
    return arrival[graph.loss]


def _paths(template: Template, weights: dict[str, float]) -> tuple[dict[Ref, float], dict[Ref, dict[int, float]]]:
    """For each output: the heaviest path inside the unit that ends there, and the heaviest from each input."""
    inside: dict[str, float] = {}
    through: dict[str, dict[int, float]] = {}
    inputs = {node.name: index for index, node in enumerate(template.of_kind(Kind.INPUT))}
    for node in template.nodes:
        own = weights.get(node.name, 0.0)
        sources = {ref.node for ref in node.operands}
        inside[node.name] = own + max((inside[name] for name in sources), default=0.0)
        reach: dict[int, float] = {inputs[node.name]: 0.0} if node.name in inputs else {}
        for name in sources:
            for index, path in through[name].items():
                reach[index] = max(reach.get(index, 0.0), path + own)
        through[node.name] = reach
    return {r: inside[r.node] for r in template.outputs}, {r: through[r.node] for r in template.outputs}
