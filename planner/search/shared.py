"""What meshes have in common: templates are lowered and priced once for all ways to arrange the same local sizes.

Data parallelism and microbatches both split the batch. Where a template's placements split the same dims on both axes,
only the product of the two sizes shows in its local types, and the microbatch axis allows no conversion inside a
template: so dp has none either. Two meshes with the same product, the same labels and the same other axes therefore run
the same local program, and one price serves all of them, whatever the pipeline around it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..capture.graph import ModelGraph
from ..sharding.mesh import MICROBATCH, Mesh
from ..sharding.program import ModelProgram, Placements, TemplatePlacement, TemplateProgram, local_program
from .unit_kinds import UnitKinds

DATA_AXES = ("dp", MICROBATCH)


@dataclass(frozen=True)
class Shared:
    """Caches of one cluster and stack; empty at first, and right to drop at any time.

    `lowered`: local programs; `costs`: what `unit_costs.py` works out from them; `prices`: seconds of operations and
    collectives (`prices.py`).
    """

    lowered: dict[Hashable, TemplateProgram] = field(default_factory=dict)
    costs: dict[Hashable, Any] = field(default_factory=dict)  # each module keeps its own kind under its own keys
    prices: dict[Hashable, Any] = field(default_factory=dict)
    _labels: dict[int, tuple[TemplatePlacement, _Labels]] = field(default_factory=dict)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def number(self, value: Hashable) -> int:
        """Equal for equal values: a key that takes their place."""
        return self._numbers.setdefault(value, len(self._numbers))

    def kinds(self, graph: ModelGraph) -> UnitKinds:
        """What is known of a graph's units."""
        key = ("kinds", id(graph))  # the kinds keep the graph alive, so its id stays its own
        if key not in self.costs:
            self.costs[key] = UnitKinds(graph)
        return self.costs[key]

    def program(self, graph: ModelGraph, placements: Placements, mesh: Mesh) -> ModelProgram:
        """As `model_program`, with the templates that another mesh has lowered already.

        Raises:
            CannotLower: the placements do not go on this mesh.
        """
        present = tuple(axis.name for axis in mesh.axes)  # layouts name the axes that are there
        templates = []
        for key, template, placement in zip(
            self.keys(graph, placements, mesh), graph.templates, placements, strict=True
        ):
            if (present, key) not in self.lowered:
                self.lowered[present, key] = local_program(template, placement, mesh)
            templates.append(self.lowered[present, key])
        return ModelProgram(graph=graph, mesh=mesh, templates=tuple(templates))

    def keys(self, graph: ModelGraph, placements: Placements, mesh: Mesh) -> tuple[int, ...]:
        """For each template what is equal on meshes that give it the same local types and collectives."""
        # A template is kept alive by its program, so its id stays its own.
        pairs = zip(graph.templates, placements, strict=True)
        return tuple(self.number((id(template), self._key(placement, mesh))) for template, placement in pairs)

    def _key(self, placement: TemplatePlacement, mesh: Mesh) -> Hashable:
        labels = self._labels_of(placement)
        others = tuple((axis.name, axis.size) for axis in mesh.axes if axis.name not in DATA_AXES)
        if mesh.microbatches > 1 and (mesh.dp == 1 or labels.is_alike):
            return (mesh.dp * mesh.microbatches, others, labels.without_dp)
        return (mesh.dp, mesh.microbatches, others, labels.all)

    def _labels_of(self, placement: TemplatePlacement) -> _Labels:
        if id(placement) not in self._labels:
            self._labels[id(placement)] = placement, self._new_labels(placement)
        return self._labels[id(placement)][1]

    def _new_labels(self, placement: TemplatePlacement) -> _Labels:
        named = tuple((name, tuple(sorted(labels.items()))) for name, labels in sorted(placement.items()))
        rest = tuple((name, tuple(item for item in labels if item[0] != "dp")) for name, labels in named)
        return _Labels(
            all=self.number(named),
            without_dp=self.number(tuple(item for item in rest if item[1])),
            is_alike=all(labels.get("dp") == labels.get(MICROBATCH) for labels in placement.values()),
        )


@dataclass(frozen=True, slots=True)
class _Labels:
    """Numbers for a template's placement. `is_alike`: dp splits what microbatches split."""

    all: int
    without_dp: int
    is_alike: bool
