"""Units to be cut into pipeline stages, and what a cut is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

_ROUNDING = 1e-12  # of sums of bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """Units in order (without the prelude), seconds and bytes each; `cut_seconds[k]`: a cut behind unit k, per step.

    `halfway`: by stage, of how many of the microbatches in flight all is kept that was made again, `remade_bytes` of
    each; empty where of none.
    """

    seconds: tuple[float, ...]
    held_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    cut_seconds: tuple[float, ...]
    in_flight: tuple[int, ...]  # by stage
    rank_of: tuple[int, ...]  # by stage
    microbatches: int
    room_bytes: float  # of the largest rank
    pace: tuple[float, ...] = ()  # by stage: seconds over those on the fastest rank; empty where all are 1
    short_bytes: tuple[float, ...] = ()  # by rank: how much less room it has; empty where all have the same
    halfway: tuple[int, ...] = ()
    remade_bytes: tuple[float, ...] = ()

    @property
    def are_ranks_alike(self) -> bool:
        return len({*self.pace}) <= 1 and len({*self.short_bytes}) <= 1

    def pace_of(self, stage: int) -> float:
        return self.pace[stage] if self.pace else 1.0

    def room_of(self, rank: int) -> float:
        return self.room_bytes - (self.short_bytes[rank] if self.short_bytes else 0.0)

    def alive(self, stage: int) -> tuple[int, int]:
        """The microbatches of a stage that have not been run again, and those that have."""
        halfway = self.halfway[stage] if self.halfway else 0
        return self.in_flight[stage] - halfway, halfway

    def used_bytes(self, stage: int) -> list[float]:
        """What each unit takes of a stage's memory."""
        untouched, halfway = self.alive(stage)
        units = zip(self.held_bytes, self.kept_bytes, self.remade_bytes or self.kept_bytes, strict=True)
        return [held + untouched * kept + halfway * remade for held, kept, remade in units]

    @property
    def num_stages(self) -> int:
        return len(self.in_flight)

    @property
    def weight(self) -> float:
        """Of the slowest stage; with one microbatch balance is still worth a little."""
        return max(self.microbatches - 1, 1e-3)


def objective(cutting: Cutting, ends: Sequence[int]) -> float:
    """The slowest stage's part plus the price of the cuts; infinite where a stage is empty or does not fit."""
    bounds = [0, *ends, len(cutting.seconds)]
    sizes = cutting.seconds, cutting.held_bytes, cutting.kept_bytes, cutting.remade_bytes or cutting.kept_bytes
    time, held, kept, remade = ((0.0, *accumulate(each)) for each in sizes)
    slowest = 0.0
    used = [0.0] * len(cutting.rank_of)
    for stage, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last <= first:
            return inf
        untouched, halfway = cutting.alive(stage)
        activations = untouched * (kept[last] - kept[first]) + halfway * (remade[last] - remade[first])
        used[cutting.rank_of[stage]] += held[last] - held[first] + activations
        slowest = max(slowest, cutting.pace_of(stage) * (time[last] - time[first]))
    if any(size > cutting.room_of(rank) * (1 + _ROUNDING) for rank, size in enumerate(used) if size):
        return inf
    return cutting.weight * slowest + sum(cutting.cut_seconds[end - 1] for end in ends)
