"""What each pipeline rank runs on -> how much slower than the fastest device it is, and its memory.

The ranks of one pipeline coordinate that work in step go at the pace of the slowest, and have the memory of the
smallest: all of them, or those of a dp rank where each takes its own number of microbatches.
Prices are those of the fastest device, with the memory of the largest: a factor is never below 1, so lower bounds hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ...cost_models.errors import AutoparError
from ...cost_models.hardware import Cluster
from ...cost_models.stacks import Stack
from ..capture.graph import ModelGraph
from ..sharding.mesh import Mesh
from .mesh_bounds import whole_model
from .space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeeds:
    """By pipeline rank: `slowdown` is at least 1."""

    slowdown: tuple[float, ...]
    hbm_bytes: tuple[int, ...]

    @property
    def are_alike(self) -> bool:
        """Whether all are as the prices have it."""
        return set(self.slowdown) == {1.0} and len({*self.hbm_bytes}) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a cluster as one model sees them: seconds of its whole step on each, over those on the fastest.

    `cluster`: with the fastest device and the largest memory, what prices and bounds are taken from.
    """

    cluster: Cluster
    original: Cluster
    ratios: Mapping[str, float]
    slow_ranks: tuple[tuple[int, float], ...]  # (rank, factor) of stragglers that are known

    def of(self, mesh: Mesh) -> RankSpeeds:
        """The ranks of a mesh; pipeline ranks are the outermost axis, and each has its slowest and smallest device."""
        return self._worst(range(0, mesh.world_size, mesh.stage_size), mesh.stage_size)

    def of_dp_ranks(self, mesh: Mesh) -> tuple[RankSpeeds, ...]:
        """The same of each dp rank."""
        if not self.differ:
            return (self.of(mesh),) * mesh.dp
        each = mesh.stride("dp")
        return tuple(self._worst(range(rank * each, mesh.world_size, mesh.stage_size), each) for rank in range(mesh.dp))

    @property
    def differ(self) -> bool:
        """Whether some rank may be slower or smaller than another."""
        return bool(self.original.groups or self.slow_ranks)

    def _worst(self, starts: Sequence[int], size: int) -> RankSpeeds:
        """Of runs of `size` ranks that start there."""
        if not self.differ:
            gpu = self.original.gpu
            count = len(starts)
            return RankSpeeds(slowdown=(max(self.ratios[gpu.name], 1.0),) * count, hbm_bytes=(gpu.hbm_bytes,) * count)
        slowdown, hbm_bytes = [], []
        for first in starts:
            gpus = self.original.gpus_of(range(first, first + size))
            straggling = (
                self.ratios[self.original.gpu_of_rank(rank).name] * factor
                for rank, factor in self.slow_ranks
                if first <= rank < first + size
            )
            slowdown.append(max(*(self.ratios[gpu.name] for gpu in gpus), *straggling, 1.0))
            hbm_bytes.append(min(gpu.hbm_bytes for gpu in gpus))
        return RankSpeeds(slowdown=tuple(slowdown), hbm_bytes=tuple(hbm_bytes))


def devices_of(
    space: Space, master: ModelGraph, cluster: Cluster, stack: Stack, *, gpus: int, slow_ranks: Mapping[int, float]
) -> Devices:
    """What the first `gpus` ranks of a cluster run on.

    Raises:
        AutoparError: a slow rank that is not there, or a factor below 1.
    """
    for rank, factor in slow_ranks.items():
        if not 0 <= rank < gpus:
            raise AutoparError(f"rank {rank} is slow, and there are {gpus} ranks", fix=f"ranks are 0 to {gpus - 1}")
        if not 1 <= factor < float("inf"):
            raise AutoparError(f"rank {rank} takes {factor:g} times as long", fix="give a factor of at least 1")
    kinds = {gpu.name: gpu for gpu in cluster.gpus_of(range(gpus))}
    seconds = dict.fromkeys(kinds, 1.0)
    if len(kinds) > 1:
        for name, gpu in kinds.items():
            seconds[name] = whole_model(space, master, replace(cluster, gpu=gpu), stack).device_seconds
    fastest = min(kinds, key=lambda name: (seconds[name], name))
    largest = max(gpu.hbm_bytes for gpu in kinds.values())
    priced = cluster
    if kinds[fastest] != cluster.gpu or largest != cluster.gpu.hbm_bytes:
        priced = replace(cluster, gpu=replace(kinds[fastest], hbm_bytes=largest))
    return Devices(
        cluster=priced,
        original=cluster,
        ratios={name: time / seconds[fastest] if seconds[fastest] else 1.0 for name, time in seconds.items()},
        slow_ranks=tuple(sorted(slow_ranks.items())),
    )
