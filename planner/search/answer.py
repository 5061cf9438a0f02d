"""What a search is asked and what it answers, and which of two answers is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...cost_models.hardware import Cluster
from ...cost_models.stacks import Stack
from ..capture.graph import ModelGraph
from ..checkpointing import Checkpointing
from ..sharding.mesh import Mesh
from ..sharding.program import Placements
from ..zero import Zero
from .batch import BatchSplit
from .evaluate import Evaluated
from .pins import Pins


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is given: the captured step, the hardware, and the pins."""

    graph: ModelGraph
    gpus: int
    cluster: Cluster
    stack: Stack
    precision: str
    optimizer: str
    pins: Pins
    exact: bool = False
    tp_may_split_batch: bool = False
    time_limit_seconds: float | None = None
    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # rank -> how many times as long it takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A complete, priced choice."""

    mesh: Mesh
    placements: Placements
    stages: tuple[tuple[int, int], ...]  # unit ranges, the prelude in the first
    schedule: str
    zero: Zero
    activation_checkpoint: Checkpointing
    cost: Evaluated
    hbm_bytes: tuple[int, ...]  # by pipeline rank

    @property
    def fits(self) -> bool:
        return all(memory["total"] <= size for memory, size in zip(self.cost.rank_memory, self.hbm_bytes, strict=True))

    @property
    def outer(self) -> Mesh:
        """The mesh as the outer loop has it, without the groups that ZeRO does not split over and uneven shares."""
        return replace(self.mesh, replicas=1, shares=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer of a sweep. `runners_up` holds the best of every other mesh that was priced."""

    best: Candidate
    runners_up: tuple[Candidate, ...]
    baselines: tuple[tuple[str, Candidate], ...]  # what people ask for by name, where the pins allow it
    bound_seconds: float
    considered: int
    solved: int
    is_complete: bool  # False: the time limit cut the sweep short
    batch: BatchSplit


class NothingFits(Exception):
    """Every candidate needs more memory than there is; `least` needs the least.

    `obstacle`: why the batch cannot be cut into microbatches, "" if it can.
    """

    def __init__(self, least: Candidate, obstacle: str = "") -> None:
        super().__init__("nothing fits")
        self.least, self.obstacle = least, obstacle


def rank(candidate: Candidate) -> tuple[float, int, int, int, int]:
    """Faster first; then less memory, fewer stages, less splitting."""
    cost = candidate.cost
    return (cost.step_seconds, cost.memory_bytes, candidate.mesh.pp, candidate.mesh.tp, candidate.mesh.microbatches)


def best_of_other_meshes(found: list[Candidate], chosen: Candidate) -> tuple[Candidate, ...]:
    by_sizes: dict[Mesh, Candidate] = {}
    for candidate in found:
        sizes = replace(candidate.outer, microbatches=1)
        if sizes == replace(chosen.mesh, microbatches=1, shares=()):
            continue
        old = by_sizes.get(sizes)
        if old is None or (not candidate.fits, rank(candidate)) < (not old.fits, rank(old)):
            by_sizes[sizes] = candidate
    return tuple(sorted(by_sizes.values(), key=lambda c: (not c.fits, rank(c))))
