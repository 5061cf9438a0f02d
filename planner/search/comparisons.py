"""What the best plan is compared with: one axis alone, with and without a planner, and the best of every other mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..sharding.mesh import Mesh
from .answer import Candidate, Setting, best_of_other_meshes, rank
from .placing import Placer
from .policies import checkpoints_for, shardings_for
from .pricing import Pricer

_NUM_COMPLETE = 3  # runners-up that are shown at their best
_NUM_RUNNERS = 8  # that are simulated though they lose


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparisons:
    """Answers beside the best one. `solve`: a mesh with placements of its own; `price`: with those of others where its
    own take long to find. `is_late`: whether the time is up."""

    setting: Setting
    pricer: Pricer
    placer: Placer
    solve: Callable[[Mesh], Sequence[Candidate]]
    price: Callable[[Mesh], Sequence[Candidate]]
    is_late: Callable[[], bool]

    def baselines(self, every: Sequence[Mesh], found: list[Candidate]) -> Iterator[tuple[str, Candidate]]:
        """One axis only, whatever its bound: people ask. Those not in `found` are added, as runners-up."""
        gpus = self.setting.gpus
        for axis in ("dp", "tp", "pp", "cp", "ep") if gpus > 1 else ():
            same = [mesh for mesh in every if mesh.sizes[axis] == gpus]
            # The most promising one, for the search may have left it out and kept one that is worse.
            if not any(candidate.outer in same[:1] for candidate in found):
                for mesh in same[:1] if not self.is_late() else ():
                    found.extend(self.solve(mesh))
            priced = [candidate for candidate in found if candidate.outer in same]
            if priced:
                best = min(priced, key=lambda candidate: (not candidate.fits, rank(candidate)))
                yield f"{axis} only", self.pricer.simulated(best)
            yield from self._plain(axis, same)

    def _plain(self, axis: str, same: Sequence[Mesh]) -> Iterator[tuple[str, Candidate]]:
        """An axis as it is used without a planner: all states split over dp, or stages that wait for each other."""
        pins = self.setting.pins
        for mesh in same if not self.is_late() else ():
            shardings = shardings_for(self.setting.graph, mesh, pins, self.setting.cluster)
            zero = 3 if axis == "dp" and (3, 1) in shardings else 0
            if mesh.microbatches > 1 or axis not in ("dp", "pp") or (axis == "dp" and not zero):
                continue
            placements = self.placer.solve(mesh, 0.0)
            if isinstance(placements, str):
                continue
            name = "ZeRO-3 only" if zero else "naive model parallel"
            checkpoint = checkpoints_for(self.setting.graph, pins)[0]
            evaluator = self.pricer.evaluator(mesh, placements)
            for pipeline in self.pricer.pipelines(mesh, zero)[:1]:
                each = self.pricer.candidate(evaluator, pipeline, zero, checkpoint)
                if each is not None:
                    yield name, self.pricer.simulated(each)

    def complete(self, every: Sequence[Mesh], found: list[Candidate], chosen: Candidate) -> None:
        """Add the nearest other meshes with their most promising microbatches, where the search left these out."""
        priced = {candidate.outer for candidate in found}
        for other in best_of_other_meshes(found, chosen)[:_NUM_COMPLETE]:
            mesh = next(mesh for mesh in every if mesh.sizes == other.outer.sizes)
            if mesh not in priced and not self.is_late():
                found.extend(self.price(mesh))

    def runners_up(self, found: list[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
        """The best of every other mesh, the first few simulated."""
        others = best_of_other_meshes(found, chosen)
        first = [
            self.pricer.simulated(candidate) if candidate.fits else candidate for candidate in others[:_NUM_RUNNERS]
        ]
        return (*sorted(first, key=lambda c: (not c.fits, rank(c))), *others[_NUM_RUNNERS:])


__all__ = ["Comparisons"]
