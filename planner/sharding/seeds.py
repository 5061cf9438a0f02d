"""Refuses random operations that would draw from no seed: ranks would draw apart, recomputation other numbers."""

from __future__ import annotations

from ..capture.graph import Kind, ModelGraph, Node
from ..capture.random_ops import is_random
from ..errors import UnsupportedModel
from .rules import SeedRef, rule_of


def refuse_unseeded(graph: ModelGraph) -> None:
    """Refuse a graph with a random operation that no rule gives a seed of (step, microbatch, operation, coordinates).

    Raises:
        UnsupportedModel: names the first one, with its line.
    """
    for template in graph.templates:
        for node in template.nodes:
            if node.kind is Kind.OP and is_random(node.op, node.args, node.kwargs) and not _is_seeded(node):
                raise UnsupportedModel(
                    f"{node.op} draws random numbers, which ranks would draw apart and recomputation would draw anew",
                    where=node.source or f"{node.name} in {template.name}",
                    fix="draw by dropout (nn.Dropout, dropout_p of attention), torch.rand, randn, randint, bernoulli "
                    "or a method that fills (bernoulli_, uniform_, normal_), with no generator of your own; or build "
                    "the module with options for which that line does not run",
                )


def _is_seeded(node: Node) -> bool:
    rule = rule_of(node.op)
    if rule is None:
        return False
    call = rule.localise(node, {}, node.outputs, {})
    return any(isinstance(arg, SeedRef) for arg in (*call.args, *(value for _, value in call.kwargs)))


__all__ = ["refuse_unseeded"]
