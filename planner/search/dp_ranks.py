"""The pipeline ranks of one or several paces -> what a step's microbatches take, alike on all dp ranks or shared out.

Where no microbatch exchanges anything over dp, each dp rank goes through its own at its own pace, and they meet for the
gradients at the end: the slowest with its share decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from .batch_shares import Sharing, pinned_shares
from .rank_speeds import RankSpeeds
from .stage_cost import StageCost

_NEGLIGIBLE = 1e-9  # of the seconds of even shares


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineRank:
    """The stages of one pipeline rank. `acting_seconds`: of one microbatch, with what the schedule takes of the host;
    `after_seconds`: once a step."""

    stages: tuple[StageCost, ...]
    memory: Mapping[str, int]
    busy_seconds: float
    acting_seconds: float
    after_seconds: float


Pipeline = Sequence[PipelineRank]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """A step's microbatches.

    `ranks`, `microbatches`, `seconds`: of the dp rank that the others wait for. `shown`: the same ranks, or those of
    the first dp rank where shares are uneven. `tight`: of each pipeline rank the one with least memory to spare, and
    `hbm_bytes` what it has; empty where all dp ranks are alike. `shares`: as in `Mesh`. `is_simulated`: False where it
    takes longer than `seconds`.
    """

    ranks: Pipeline
    microbatches: int
    seconds: float
    shown: Pipeline
    tight: Pipeline
    hbm_bytes: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    is_simulated: bool = False


@dataclass(frozen=True, kw_only=True)
class DpRanks:
    """dp ranks of different paces. `speeds`: of each. `microbatches`: the mean of their numbers.

    `priced`: (pace by pipeline rank, microbatches) -> the pipeline ranks; `timeline`: their seconds of so many
    microbatches. `counts`: (least, step) of the numbers that the schedule runs, None where it runs but one.
    `ratio`: the shares that are pinned, in any unit; empty where they are free.
    """

    speeds: tuple[RankSpeeds, ...]
    microbatches: int
    priced: Callable[[tuple[float, ...], int], Pipeline]
    timeline: Callable[[Pipeline, int], float]
    counts: tuple[int, int] | None
    ratio: tuple[int, ...] = ()
    _priced: dict[tuple[int, int], Pipeline] = field(default_factory=dict, init=False)
    _seconds: dict[tuple[int, int], float] = field(default_factory=dict, init=False)

    @cached_property
    def _paces(self) -> tuple[RankSpeeds, ...]:
        return tuple(dict.fromkeys(self.speeds))

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """Which of the different paces each dp rank has."""
        return tuple(map(self._paces.index, self.speeds))

    @property
    def _even(self) -> tuple[int, ...]:
        return (self.microbatches,) * len(self.speeds)

    def _ranks(self, kind: int, count: int) -> Pipeline:
        if (kind, count) not in self._priced:
            self._priced[kind, count] = self.priced(self._paces[kind].slowdown, count)
        return self._priced[kind, count]

    def _took(self, kind: int, count: int) -> float:
        if (kind, count) not in self._seconds:
            # A microbatch takes as long, however many there are.
            self._seconds[kind, count] = self.timeline(self._ranks(kind, self.microbatches), count)
        return self._seconds[kind, count]

    def _spare_bytes(self, kind: int, count: int) -> list[int]:
        pairs = zip(self._ranks(kind, count), self._paces[kind].hbm_bytes, strict=True)
        return [size - rank.memory["total"] for rank, size in pairs]

    def _fits(self, kind: int, count: int) -> bool:
        return min(self._spare_bytes(kind, count)) >= 0

    def _longest(self, shares: Sequence[int]) -> float:
        return max(map(self._took, self._kinds, shares))

    @property
    def _busy_seconds(self) -> tuple[float, ...]:
        """Of one microbatch on the busiest pipeline rank of each dp rank."""
        return tuple(max(rank.acting_seconds for rank in self._ranks(kind, self.microbatches)) for kind in self._kinds)

    def course(self, may_win: Callable[[float], bool]) -> Course:
        """With the shares that are pinned, or those with which the slowest is done first; even ones where none are
        faster. The schedule is not run where what the microbatches surely take is too long to win."""
        total, busy = sum(self._even), self._busy_seconds
        pinned = pinned_shares(self.ratio, total) if self.ratio else None
        shares = pinned or self._even
        least = max(seconds * count for seconds, count in zip(busy, shares, strict=True))
        if not pinned:
            least = total / sum(1 / seconds for seconds in busy) if all(busy) else 0.0
        is_simulated = may_win(least)
        if is_simulated and not pinned:
            shares = self._best(total)
        ranks = [self._ranks(kind, count) for kind, count in zip(self._kinds, shares, strict=True)]
        times = [least] * len(shares)
        if is_simulated:
            times = list(map(self._took, self._kinds, shares))
        slowest = max(range(len(times)), key=lambda d: times[d])
        spare = list(map(self._spare_bytes, self._kinds, shares))
        tight = [min(range(len(spare)), key=lambda d: spare[d][p]) for p in range(len(spare[0]))]
        is_uneven = len({*shares}) > 1
        return Course(
            ranks=ranks[slowest],
            microbatches=shares[slowest],
            seconds=times[slowest],
            shown=ranks[0 if is_uneven else slowest],
            tight=[ranks[d][p] for p, d in enumerate(tight)],
            hbm_bytes=tuple(self.speeds[d].hbm_bytes[p] for p, d in enumerate(tight)),
            shares=shares if is_uneven else (),
            is_simulated=is_simulated,
        )

    def _best(self, total: int) -> tuple[int, ...]:
        if self.counts is None:
            return self._even
        least, step = self.counts
        sharing = Sharing(total, self._kinds, self._took, self._fits, least, step)
        shares = sharing.best()
        if shares is None:
            return self._even
        does_even_fit = all(self._fits(kind, self.microbatches) for kind in {*self._kinds})
        is_faster = self._longest(shares) < self._longest(self._even) * (1 - _NEGLIGIBLE)
        return shares if is_faster or not does_even_fit else self._even


def with_memory(shown: Pipeline, tight: Pipeline) -> list[tuple[StageCost, ...]]:
    """The stages of each pipeline rank: the times of `shown` ranks, the memory of `tight` ones."""
    return [
        rank.stages if rank is fullest else tuple(map(_with_memory, rank.stages, fullest.stages))
        for rank, fullest in zip(shown, tight, strict=True)
    ]


def _with_memory(stage: StageCost, other: StageCost) -> StageCost:
    return replace(stage, memory_bytes=other.memory_bytes)


__all__ = ["Course", "DpRanks", "PipelineRank", "with_memory"]
