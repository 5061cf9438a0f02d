"""The most even cut into pipeline stages that fits, without a program.

Whether stages can stay below a number of seconds is seen by filling them from the last one on, each with as many units
as stay below it and fit: later stages keep fewer microbatches, so what they can take is best taken there. The same pass
tells the next larger number with which some stage would take a unit more. Between the largest that is known to be too
small and the slowest stage of the best cut so far, the range is halved until the two meet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf

from .assignment import NoAssignment
from .cutting import Cutting

_ROUNDING = 1e-12  # of sums of seconds


def cut_evenly(cutting: Cutting, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """The ends that keep the slowest stage shortest; of those that do, the ones with the fullest last stages.

    `may_be_empty`: stages may have no unit, as where none fits a slow one: what then has no empty stage is the best.

    Raises:
        NoAssignment: too few units, or nothing fits.
    """
    filling = _Filling(cutting, may_be_empty)
    low = _least_slowest(cutting.seconds, cutting.num_stages, cutting.pace, may_be_empty)
    ends, low = filling.below(low)
    if ends is not None:
        return ends  # as short as without limits of memory
    ends, _ = filling.below(inf)
    if ends is None:
        raise NoAssignment
    return _shortened(filling, ends, low)


def _shortened(filling: _Filling, ends: tuple[int, ...], low: float) -> tuple[int, ...]:
    """Better ends, as good as they get; no cut has a slowest stage below `low` seconds."""
    slowest = filling.slowest(ends)
    limit = low
    while limit < slowest * (1 - _ROUNDING):
        found, following = filling.below(limit)
        if found is None:
            low = following
        else:
            ends, slowest = found, filling.slowest(found)
        limit = (low + slowest) / 2 if low < slowest else slowest
    return ends


@lru_cache(maxsize=1 << 10)
def _least_slowest(seconds: tuple[float, ...], stages: int, pace: tuple[float, ...], may_be_empty: bool) -> float:
    """Seconds of the slowest stage at least, whatever the memory: the same under many policies.

    Raises:
        NoAssignment: too few units.
    """
    free = (0.0,) * len(seconds)
    cutting = Cutting(
        seconds=seconds, held_bytes=free, kept_bytes=free, cut_seconds=free, in_flight=(1,) * stages,
        rank_of=(0,) * stages, microbatches=1, room_bytes=inf, pace=pace,
    )  # fmt: skip
    filling = _Filling(cutting, may_be_empty)
    ends, _ = filling.below(inf)
    if ends is None:
        raise NoAssignment
    paces = pace or (1.0,) * stages
    low = max(sum(seconds) / sum(1 / each for each in paces), min(paces) * max(seconds))  # for any cut
    return filling.slowest(_shortened(filling, ends, low))


@dataclass(frozen=True)
class _Filling:
    """Stages filled from the last one on; sums count from the end of the model."""

    cutting: Cutting
    may_be_empty: bool

    @cached_property
    def _time(self) -> list[float]:
        return [0.0, *accumulate(reversed(self.cutting.seconds))]

    @cached_property
    def _held(self) -> list[float]:
        return [0.0, *accumulate(reversed(self.cutting.held_bytes))]

    @cached_property
    def _kept(self) -> list[float]:
        return [0.0, *accumulate(reversed(self.cutting.kept_bytes))]

    @cached_property
    def _remade(self) -> list[float]:
        return [0.0, *accumulate(reversed(self.cutting.remade_bytes or self.cutting.kept_bytes))]

    def _fitting(self, stage: int, taken: int, most: int) -> int:
        """How many of the last units, `most` at most, are taken where a stage holds what fits behind the first."""
        held, kept, remade = self._held, self._kept, self._remade
        untouched, halfway = self.cutting.alive(stage)

        def used(k: int) -> float:
            return held[k] + untouched * kept[k] + halfway * remade[k]

        room = self.cutting.room_of(self.cutting.rank_of[stage]) + used(taken)
        return most if used(most) <= room else bisect_right(range(most + 1), room, key=used) - 1

    def below(self, limit: float) -> tuple[tuple[int, ...] | None, float]:
        """Ends of stages that take at most `limit` seconds and fit, and the next limit that gives other ends."""
        cutting, time = self.cutting, self._time
        units, stages = len(cutting.seconds), cutting.num_stages
        taken, following = 0, inf
        found: list[int] = []
        for stage in reversed(range(stages)):
            pace = cutting.pace_of(stage)
            most = units - stage
            quick = bisect_right(time, time[taken] + limit / pace * (1 + _ROUNDING)) - 1
            # A unit more is looked at, so that the next limit is one that memory allows.
            last = self._fitting(stage, taken, min(most, quick + 1))
            if last > quick:
                last = quick
                following = min(following, (time[last + 1] - time[taken]) * pace)
            if last <= taken and not self.may_be_empty:
                return None, following
            taken = max(last, taken)
            found.append(units - taken)
        return (tuple(reversed(found[:-1])) if taken == units else None), following

    def slowest(self, ends: Sequence[int]) -> float:
        """Seconds of the slowest stage."""
        time, units = self._time, len(self.cutting.seconds)
        bounds = [units, *(units - end for end in ends), 0]
        pairs = enumerate(zip(bounds, bounds[1:], strict=False))
        return max(self.cutting.pace_of(stage) * (time[a] - time[b]) for stage, (a, b) in pairs)
