"""The device mesh: pp stages, and the axes that split tensors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that can split tensors. The microbatch axis splits the batch in time instead of over ranks."""

    name: str
    size: int

    @property
    def is_time(self) -> bool:
        return self.name == MICROBATCH


MICROBATCH = "microbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """pp x dp x tp ranks, pp outermost, tp innermost (neighbours in a node), and the number of microbatches a step."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    microbatches: int = 1

    def __post_init__(self) -> None:
        for name in ("pp", "dp", "tp", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"mesh {name} must be at least 1, got {getattr(self, name)}")

    @property
    def sizes(self) -> dict[str, int]:
        """Rank axes in mesh order, size 1 included."""
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    @property
    def world_size(self) -> int:
        return prod(self.sizes.values())

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Axes that split tensors, major first, without those of size 1: dp, then microbatch, then tp."""
        every = (Axis("dp", self.dp), Axis(MICROBATCH, self.microbatches), Axis("tp", self.tp))
        return tuple(axis for axis in every if axis.size > 1)

    def axis(self, name: str) -> Axis:
        return Axis(name, self.microbatches if name == MICROBATCH else self.sizes[name])
