"""Meshes under the labellings that they may take over -> priced, those first that may be fastest.

A labelling on a mesh is known by ever more of it: the bound of the mesh, the seconds that its ranks are busy, what its
policies take where they fit. A queue holds each with the last of these, and only what comes to its head is worked out
further. Meshes may be added while some wait in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from ..checkpointing import POLICIES
from ..errors import CannotLower
from ..sharding.mesh import SPLIT_AXES, Mesh
from .evaluate import Evaluator
from .placing import Placer
from .pricing import Pricer
from .record import Record
from .ways import Way

_FIRST_TRIES = 2  # of each kind of mesh, until something fits
_ALIKE = 1.001  # what is so little worse counts as no better
_FAR = 0.8  # of the best step: what may be faster than this is priced before more kinds of meshes are listed


class _Entry(NamedTuple):
    """A mesh under a labelling, whose units keep its ranks busy for `least_seconds` a step."""

    mesh: Mesh
    labelling: int
    least_seconds: float


# Seconds at least, position of the entry, and its policies once they are known.
_Queued = tuple[float, int, tuple[Way, ...]]


def _burden(evaluator: Evaluator) -> tuple[float, ...]:
    """Seconds of the units and of a step's end, and the bytes kept of a microbatch, at most and at least."""
    kept = [0.0] * len(POLICIES)
    for unit, count in evaluator.least_units.recomputed(0, POLICIES).items():
        kept = [size + count * more for size, more in zip(kept, unit.kept_bytes, strict=True)]
    return evaluator.least_seconds(), evaluator.costs.whole(0, POLICIES[0]).step_seconds, *kept


@dataclass
class LabelledMeshes:
    """What is known of meshes under labellings that others have found."""

    pricer: Pricer
    placer: Placer
    record: Record
    progress: Callable[[str], None]
    leanest: dict[Mesh, int] = field(default_factory=dict, init=False)  # bytes under the leanest policy
    estimates: dict[Mesh, float] = field(default_factory=dict, init=False)  # seconds of the best labelling known
    _queue: list[_Queued] = field(default_factory=list, init=False)
    _entries: list[_Entry] = field(default_factory=list, init=False)
    _tried: set[tuple[Mesh, int]] = field(default_factory=set, init=False)  # with labellings
    # By kind of meshes the labellings that none beats in everything.
    _unbeaten: dict[tuple[int, ...], list[Evaluator]] = field(default_factory=dict, init=False)

    def add(self, order: Sequence[Mesh], bounds: Mapping[Mesh, float], since: int = 0) -> None:
        """List meshes under the labellings from the `since`-th on, and price what may be far faster than the best."""
        alike: dict[tuple[int, ...], list[Mesh]] = {}
        for mesh in order:
            if bounds[mesh] < self.record.best_seconds:
                inner = tuple(mesh.sizes[name] for name in SPLIT_AXES[1:])
                # Labellings that differ on dp alone are one where there is no dp.
                kind = (*inner, min(mesh.microbatches, 2), mesh.dp * mesh.microbatches, min(mesh.dp, 2))
                alike.setdefault(kind, []).append(mesh)
        slow: dict[int, list[tuple[int, ...]]] = {}  # kinds of meshes by labelling
        for kind in sorted(alike):
            new = self._enter(alike[kind], kind, since, slow)
            for position, entry in enumerate(new):
                seconds = max(entry.least_seconds, bounds[entry.mesh])
                if self.record.best_seconds == inf and position % max(1, len(new) // _FIRST_TRIES) == 0:
                    self._try(entry, self._ways(entry))
                    continue
                heappush(self._queue, (seconds, len(self._entries), ()))
                self._entries.append(entry)
            if self.record.best_seconds < inf:
                self._price_first(_FAR)

    def finish(self) -> None:
        """Price all that waits and may be faster than the best."""
        self._price_first(1.0)
        self._queue.clear()

    def _price_first(self, factor: float) -> None:
        """Price what may take less than `factor` of the best step, the most promising first."""
        queue = self._queue
        while queue and not self.record.is_late:
            if factor * self.record.best_seconds <= queue[0][0] < self.record.best_seconds:
                break
            least, position, ways = heappop(queue)
            if least >= self.record.best_seconds:
                continue
            if ways:
                self.progress(f"pricing mesh {position + 1} of {len(self._entries)}")
                self._try(self._entries[position], ways)
            elif ways := self._ways(self._entries[position]):
                heappush(queue, (min(way.fitting.likely for way in ways), position, ways))

    def _enter(
        self, meshes: Sequence[Mesh], kind: tuple[int, ...], since: int, slow: dict[int, list[tuple[int, ...]]]
    ) -> list[_Entry]:
        """Meshes of one kind, with equal local sizes, under the labellings that may beat the best on them.

        Their ranks are busy equally long: with more stages fewer of them share the samples. `slow`: by labelling the
        kinds where it does not, which is added to; it gets no faster where it is split further.
        """
        found: list[_Entry] = []
        for labelling in self.placer.known(meshes[0], since):
            if any(all(a <= b for a, b in zip(other, kind, strict=True)) for other in slow.get(labelling, ())):
                continue
            try:
                evaluator = self.pricer.evaluator(meshes[0], self.placer.taken(meshes[0], labelling))
                least = evaluator.least_seconds()
                for mesh in meshes:
                    self.estimates.setdefault(mesh, least)
                if least >= self.record.best_seconds:
                    slow.setdefault(labelling, []).append(kind)
                    continue
                if self._is_beaten(kind, evaluator):
                    continue
            except CannotLower:
                continue
            found.extend(_Entry(mesh, labelling, least) for mesh in meshes)
        return found

    def _is_beaten(self, kind: tuple[int, ...], evaluator: Evaluator) -> bool:
        """Whether another labelling of this kind of mesh takes neither longer nor more memory, as far as is known."""
        others = self._unbeaten.setdefault(kind, [])
        if others:
            new = _burden(evaluator)
            if any(all(a <= _ALIKE * b for a, b in zip(_burden(other), new, strict=True)) for other in others):
                return True
        others.append(evaluator)
        return False

    def _ways(self, entry: _Entry) -> tuple[Way, ...]:
        """The policies of a mesh under what another one has found, each mesh and labelling once."""
        mesh, labelling = entry.mesh, entry.labelling
        if (mesh, labelling) in self._tried or not self.placer.may_take(mesh, labelling):
            return ()
        self._tried.add((mesh, labelling))
        try:
            return tuple(self.pricer.ways(mesh, self.placer.taken(mesh, labelling), self.record.best_seconds))
        except CannotLower:
            return ()

    def _try(self, entry: _Entry, ways: Sequence[Way]) -> None:
        """Price them; there are none where the placements cannot have the shares of the batch that are pinned."""
        if not ways:
            return
        mesh = entry.mesh
        every = self.pricer.priced_ways(mesh, ways, self.record.best_seconds)
        if not every.candidates:
            self.leanest.setdefault(mesh, min(int(way.floor_bytes) for way in ways))
            return
        priced = every.best
        leanest = min(candidate.cost.memory_bytes for candidate in every.candidates)
        self.leanest[mesh] = min(self.leanest.get(mesh, leanest), leanest)
        if priced[0].fits:
            self.estimates[mesh] = min(self.estimates.get(mesh, inf), priced[0].cost.step_seconds)
        self.record.add(priced)
