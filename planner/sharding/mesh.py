"""The device mesh: pp stages, and the axes that split tensors.

| axis | splits | parameters |
|---|---|---|
| pp | the model into stages | those of the stage |
| dp | samples | whole, or shards under ZeRO |
| ep | samples, and experts where parameters are made of experts | whole, or some of the experts |
| cp | any dim of activations but samples: the sequence | whole, or shards under ZeRO |
| tp | any dim but samples | split |

Ranks are numbered with pp outermost and tp innermost, so that the ranks of the axis that talks most are neighbours in a
node. Where several axes split one dim, the order is dp, microbatch, ep, cp, tp, the first one major.

The ranks of dp and cp hold the same parameters, and their gradients add up: ZeRO splits states over both together,
dp major.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
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
# Axes on which they never are: over these ZeRO splits parameters, gradients and the optimizer's states.
STATE_AXES = ("dp", "cp")
_ALWAYS_WRITTEN = ("pp", "dp", "tp")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """pp x dp x ep x cp x tp ranks, and the number of microbatches a step.

    `replicas`: how many groups of dp ranks hold the same ZeRO-2 or ZeRO-3 shards: they split within a group of
    neighbours (and over cp), and gradients are summed over the groups.
    `shares`: where dp ranks take different numbers of microbatches, that of each; `microbatches` is then their mean, so
    a microbatch is as large as if all took as many.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    microbatches: int = 1
    replicas: int = 1
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (*AXES, "microbatches", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh {name} must be at least 1, got {getattr(self, name)}")
        if self.dp % self.replicas:
            raise ValueError(f"{self.replicas} replicas do not divide dp={self.dp}")
        if self.shares and (reason := refuse_shares(self.shares, self.dp, self.microbatches)):
            raise ValueError(reason)

    def share(self, dp_rank: int) -> int:
        """The microbatches of a dp rank."""
        return self.shares[dp_rank] if self.shares else self.microbatches

    @property
    def state_ranks(self) -> int:
        """The ranks that hold the same parameters, so that ZeRO can split states over them: those of dp and cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """The ranks that ZeRO-2 and ZeRO-3 split over."""
        return self.state_ranks // self.replicas

    @property
    def state_axis(self) -> str:
        """What these ranks are called together: by the one axis that they are on, or "dp_cp"."""
        return "_".join(name for name in STATE_AXES if self.sizes[name] > 1) or "dp"

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

    def state_rank(self, rank: int) -> int:
        """Where a rank is among those that ZeRO splits states over."""
        return self.coordinate(rank, "dp") * self.cp + self.coordinate(rank, "cp")

    def extents(self, name: str) -> tuple[tuple[int, int], ...]:
        """(ranks, stride), outermost first, of what a collective goes over: an axis, dp_cp, both parts of it in HSDP
        (dp_shard and dp_replicate), or the world.

        Raises:
            KeyError: nothing has this name.
        """
        if name in self.sizes:
            return ((self.sizes[name], self.stride(name)),)
        dp, cp = self.stride("dp"), (self.cp, self.stride("cp"))
        near = self.dp // self.replicas
        return {
            "dp_cp": ((self.dp, dp), cp),
            "dp_shard": ((near, dp), cp),
            "dp_replicate": ((self.replicas, near * dp),),
            "world": ((self.world_size, 1),),
        }[name]

    def joined(self, name: str, rank: int) -> tuple[int, ...]:
        """The ranks that a collective of this rank joins, by the name of what it goes over as in `extents`."""
        ranks = [rank]
        for size, stride in self.extents(name):
            ranks = [r - r // stride % size * stride + i * stride for r in ranks for i in range(size)]
        return tuple(ranks)


def splits_states(shard_size: int, dp: int, cp: int) -> bool:
    """Whether groups of so many ranks that ZeRO splits states over hold all of cp and divide dp."""
    return shard_size % cp == 0 and dp % (shard_size // cp) == 0


def refuse_shares(shares: Sequence[int], dp: int, microbatches: int) -> str:
    """Why dp ranks cannot take these numbers of microbatches, whose mean is `microbatches`; "" if they can."""
    if len(shares) != dp:
        return f"there are {len(shares)} for dp={dp}"
    if sum(shares) != dp * microbatches or min(shares) < 1:
        return f"they do not deal out {dp * microbatches} microbatches, at least one to each dp rank"
    return "all are equal" if len({*shares}) == 1 else ""


def described_shares(shares: Sequence[int]) -> str:
    """Runs of equal numbers, in words: "6 and 2", "6 (x4), 3 and 2"; "" of none."""
    runs = [(number, len(list(run))) for number, run in groupby(shares)]
    words = [f"{number} (x{count})" if count > 1 else str(number) for number, count in runs]
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def written_mesh(sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes in mesh order: pp, dp and tp always, others where they have more than one rank."""
    return {name: sizes.get(name, 1) for name in AXES if name in _ALWAYS_WRITTEN or sizes.get(name, 1) > 1}


def ordered(sizes: Mapping[str, int]) -> dict[str, int]:
    """The same axes in mesh order, unknown ones last."""
    names = [name for name in AXES if name in sizes]
    return {name: sizes[name] for name in (*names, *sorted(set(sizes) - set(names)))}
