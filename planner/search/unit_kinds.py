"""The units of a graph -> which of them are alike, which hold the same tensors, and what crosses between them.

All of it depends on the graph alone, so it is worked out once for all meshes and placements.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from ..capture.graph import ModelGraph, Value
from ..checkpointing import Checkpointing
from .step_collectives import PRELUDE_UNIT


@dataclass(frozen=True, eq=False)
class UnitKinds:
    """Facts about the units of one graph, by their index."""

    graph: ModelGraph
    _stages: dict[tuple[int, int, Checkpointing], int] = field(default_factory=dict, init=False)
    _numbers: dict[object, int] = field(default_factory=dict, init=False)

    def stage(self, first: int, last: int, recompute: Checkpointing) -> int:
        """Equal for stages that cost the same: the same templates and policies, in order, and the same shared
        tensors."""
        key = (first, last, recompute)
        if key not in self._stages:
            units = slice(max(first, 1), last)
            shared = tuple(index for index in self.sharing if first <= index < last)
            policies = recompute if isinstance(recompute, str) else recompute[units]
            kind = (first <= 1, shared, self.templates[units], policies)
            self._stages[key] = self._numbers.setdefault(kind, len(self._numbers))
        return self._stages[key]

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For every unit the first of its kind: the same template, and inputs that the same templates make."""
        units = self.graph.units
        first: dict[object, int] = {}
        return tuple(
            first.setdefault(
                (unit.template, tuple((units[value.unit].template, value.output) for value in unit.inputs)), index
            )
            for index, unit in enumerate(units)
        )

    @cached_property
    def counts(self) -> tuple[tuple[int, int], ...]:
        """(first unit, how many) of every kind, without the prelude."""
        found: dict[int, int] = {}
        for index in self.alike[1:]:
            found[index] = found.get(index, 0) + 1
        return tuple(found.items())

    def counted(self, units: range, recompute: Checkpointing) -> Counter[tuple[int, str]]:
        """(first unit of a kind, policy), and how many of `units` are such."""
        if isinstance(recompute, str):
            return Counter((index, recompute) for index in self.alike[units.start : units.stop])
        return Counter(zip(self.alike[units.start : units.stop], recompute[units.start : units.stop], strict=True))

    @cached_property
    def templates(self) -> tuple[int, ...]:
        """The template of every unit."""
        return tuple(unit.template for unit in self.graph.units)

    @cached_property
    def sharing(self) -> frozenset[int]:
        """Units that hold a tensor which another unit holds too."""
        holders: dict[str, set[int]] = {}
        for index, unit in enumerate(self.graph.units):
            for _, fqn in unit.tensors:
                holders.setdefault(fqn, set()).add(index)
        return frozenset(index for units in holders.values() if len(units) > 1 for index in units)

    @cached_property
    def crossing(self) -> tuple[tuple[Value, ...], ...]:
        """For every unit the values on a pipeline edge before it: made before, read there or behind."""
        last_read: dict[Value, int] = {}
        for index, unit in enumerate(self.graph.units):
            last_read.update(dict.fromkeys(unit.inputs, index))
        found: list[list[Value]] = [[] for _ in self.graph.units]
        for value in sorted(last_read, key=lambda value: (value.unit, value.output)):
            if value.unit != PRELUDE_UNIT:
                for boundary in range(value.unit + 1, last_read[value] + 1):
                    found[boundary].append(value)
        return tuple(map(tuple, found))

    @cached_property
    def sent(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The template and output that make each of the values that cross."""
        made = {value: (self.templates[value.unit], value.output) for values in self.crossing for value in values}
        return tuple(tuple(made[value] for value in values) for values in self.crossing)
