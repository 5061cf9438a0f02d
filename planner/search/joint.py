"""Placements over all axes together -> the columns and rows that the programs of all policies have in common.

Which placements are legal does not depend on the policy, and what units take depends on their recomputation alone:
ZeRO stages, groups of replicas and memory are a few rows more (`step_model.py`). The common part is built once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..capture.graph import Kind, ModelGraph
from ..checkpointing import Checkpointing, policy_of
from .linear import Linear, add, sum_of
from .problem import Built
from .space import Space
from .step_columns import StepColumns
from .step_units import StepUnits, UnitTerms
from .step_uses import Uses

UnitKind = tuple[int, str]  # the template of a unit, and what of it runs again


class Run(NamedTuple):
    """One microbatch through a range of units, what of the prelude runs once a step, and how many units there are."""

    forward: Linear
    backward: Linear
    once: Linear
    counts: Mapping[UnitKind, int]


@dataclass(frozen=True, kw_only=True)
class Joint:
    """The program over all axes of a mesh. `alive`: the choices of each vertex that every neighbour can serve."""

    built: Built
    uses: Uses
    alive: Sequence[Sequence[int]]
    _units: dict[tuple[tuple[UnitKind, ...], bool], UnitPrograms] = field(default_factory=dict, init=False)

    @property
    def space(self) -> Space:
        return self.uses.space

    @property
    def num_choices(self) -> int:
        return sum(map(len, self.alive))

    @cached_property
    def _columns(self) -> StepColumns:
        return StepColumns(self.space, self.built, self.alive)

    def units(self, checkpoint: Checkpointing) -> UnitPrograms:
        """What units take whose kinds are those under a policy.

        Raises:
            NoAssignment: there are no placements.
        """
        kinds = dict.fromkeys(
            kind_of(self.space.graph, index, checkpoint) for index in range(len(self.space.graph.units))
        )
        key = tuple(kinds), not isinstance(checkpoint, str)
        if key not in self._units:
            self._units[key] = UnitPrograms(self._columns.forked(), self.uses, *key)
        return self._units[key]


class UnitPrograms:
    """Units of some kinds. `columns`: the placements, and what has been asked for of the units."""

    def __init__(self, columns: StepColumns, uses: Uses, kinds: Sequence[UnitKind], is_mixed: bool) -> None:
        self.columns, self.space = columns, uses.space
        units = StepUnits(columns, uses)
        self.terms: Mapping[UnitKind, UnitTerms] = {kind: units.template(*kind, is_mixed=is_mixed) for kind in kinds}
        self._edges = units.edges()
        self._crossed: dict[tuple[int, int], tuple[Linear, Linear, Linear]] = {}

    def run(self, first: int, last: int, checkpoint: Checkpointing) -> Run:
        """Units [first, last) under a policy."""
        if (first, last) not in self._crossed:
            self._crossed[first, last] = self._between(first, last)
        ahead, back, once = self._crossed[first, last]
        counts = Counter(kind_of(self.space.graph, index, checkpoint) for index in range(max(first, 1), last))
        return Run(
            forward=sum_of([(ahead, 1.0), *((self.terms[kind].forward, count) for kind, count in counts.items())]),
            backward=sum_of([(back, 1.0), *((self.terms[kind].backward, count) for kind, count in counts.items())]),
            once=once,
            counts=counts,
        )

    def _between(self, first: int, last: int) -> tuple[Linear, Linear, Linear]:
        """Forward and backward of the edges into units [first, last), and what the prelude takes for them."""
        forward: Linear = {}
        backward: Linear = {}
        prepared: dict[tuple[int, int], list[Linear]] = {}
        edges = Counter(edge for index in range(max(first, 1), last) for edge in self._edges_into(index))
        for key, count in edges.items():
            ahead, back = self._edges[key]
            if key[0] == self.space.prelude:
                prepared.setdefault(key[:2], []).append(ahead)
                continue
            add(forward, ahead, count)
            add(backward, back, count)
        once = sum_of([(self.columns.largest("P", parts), 1.0) for parts in prepared.values()])
        return forward, backward, add(once, self.terms[self.space.prelude, "none"].forward)

    def _edges_into(self, index: int) -> Iterator[tuple[int, int, int, str]]:
        graph = self.space.graph
        unit = graph.units[index]
        for node, value in zip(graph.templates[unit.template].of_kind(Kind.INPUT), unit.inputs, strict=False):
            yield graph.units[value.unit].template, value.output, unit.template, node.name


def kind_of(graph: ModelGraph, index: int, checkpoint: Checkpointing) -> UnitKind:
    """The kind of a unit under a policy: only modules run again."""
    t = graph.units[index].template
    return t, policy_of(checkpoint, index) if graph.templates[t].is_module else "none"
