"""The device mesh: pp stages, and the axes that split tensors.

| axis | splits | parameters |
|---|---|---|
| pp | the model into stages | those of the stage |
| dp | samples | whole, or shards under ZeRO |
| ep | samples, and experts where parameters are made of experts | whole, or some of the experts |
| cp | any dim of activations but samples: the sequence | whole |
| tp | any dim but samples | split |

Ranks are numbered with pp outermost and tp innermost, so that the ranks of the axis that talks most are neighbours in a
node. Where several axes split one dim, the order is dp, microbatch, ep, cp, tp, the first one major.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that can split tensors. The microbatch axis splits the batch in time instead of over ranks."""

    name: str
    size: int

    @property
    def is_time(self) -> bool:
        return self.name == MICROBATCH


MICROBATCH = "microbatch"
AXES = ("pp", "dp", "ep", "cp", "tp")  # of ranks, outermost first
SPLIT_AXES = AXES[1:]
# Axes on which parameters may be split: where both have more than one rank, a parameter is placed on both.
PARAMETER_AXES = ("ep", "tp")
_ALWAYS_WRITTEN = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """pp x dp x ep x cp x tp ranks, and the number of microbatches a step.

    `replicas`: how many groups of dp ranks hold the same ZeRO-2 or ZeRO-3 shards: they split within a group of
    neighbours, and gradients are summed over the groups.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    microbatches: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh {name} must be at least 1, got {getattr(self, name)}")
        if self.dp % self.replicas:
            raise ValueError(f"{self.replicas} replicas do not divide dp={self.dp}")

    @property
    def shards(self) -> int:
        """The ranks of dp that ZeRO-2 and ZeRO-3 split over."""
        return self.dp // self.replicas

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Rank axes in mesh order, size 1 included."""
        return MappingProxyType({"pp": self.pp, "dp": self.dp, "ep": self.ep, "cp": self.cp, "tp": self.tp})

    @property
    def written(self) -> dict[str, int]:
        """The sizes as plans have them: ep and cp only where they have more than one rank."""
        return written_mesh(self.sizes)

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.world_size // self.pp

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that split tensors, major first, without those of size 1: dp, microbatch, ep, cp, tp."""
        every = (
            Axis("dp", self.dp),
            Axis(MICROBATCH, self.microbatches),
            Axis("ep", self.ep),
            Axis("cp", self.cp),
            Axis("tp", self.tp),
        )
        return tuple(axis for axis in every if axis.size > 1)

    def axis(self, name: str) -> Axis:
        return Axis(name, self.microbatches if name == MICROBATCH else self.sizes[name])

    def stride(self, name: str) -> int:
        """How far apart neighbours on an axis are, in ranks."""
        return prod(self.sizes[inner] for inner in AXES[AXES.index(name) + 1 :])

    def coordinate(self, rank: int, name: str) -> int:
        """Where a rank is on an axis."""
        return rank // self.stride(name) % self.sizes[name]


def written_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes in mesh order: pp, dp and tp always, others where they have more than one rank."""
    return {name: sizes.get(name, 1) for name in AXES if name in _ALWAYS_WRITTEN or sizes.get(name, 1) > 1}


def ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    """The same axes in mesh order, unknown ones last."""
    names = [name for name in AXES if name in sizes]
    return {name: sizes[name] for name in (*names, *sorted(set(sizes) - set(names)))}
