"""Where to cut the units into pipeline stages: a small integer program over cut positions, and an exact search to
check it.

Units 1..n are cut into S contiguous runs. P_k, W_k, A_k, R_k are sums over the first k units: seconds of one microbatch
(both directions), bytes held throughout (state), bytes kept per microbatch in flight, and those when what was not kept
has been made again. f_s microbatches are in flight at stage s, of h_s of which that is so (between I and W).

    c[s,k]        1 where stages 0..s hold the first k units together, s = 0..S-2 (binary); stage S-1 ends at n
    T             seconds of the slowest stage

    min   max(m - 1, 1/1000) T  +  sum_s,k B_k c[s,k]         fill and drain pay every stage once: a constant
    s.t.  sum_k c[s,k] = 1                                    for each s
          sum_k k c[s,k] - sum_k k c[s-1,k] >= 1              no stage is empty
          T >= d_s sum_k P_k (c[s,k] - c[s-1,k])              for each s
          sum_s,k (W_k + (f_s - h_s) A_k + h_s R_k)(c[s,k] - c[s-1,k]) <= M_r     for each rank r, its stages s

With m microbatches (one: balance is worth little), B_k the seconds that a cut behind unit k adds to a step (messages)
and d_s >= 1 how much slower than the fastest the rank of stage s is. Prefix sums make all rows linear: no product of
variables. `cut_by_search` solves the same problem by dynamic programming over (stage, units), for one stage per rank.

Where every cut costs the same, or nearly so, only T is left to decide, and no program is needed (`cut_evenly`): whether
all stages can stay below a given T is known by filling them from the last one on, each as far as T and memory allow.
Part of a run that fits fits too, so no other cut leaves less to the stages before. (Where ranks
differ, a unit may fit one stage and not the next: a stage is left empty then, no cut is faster than such a filling, and
the program decides; for models too large for it the fullest stages that are not empty do.)

With several stages per rank the most even cut is taken where it fits: memory alone is worth a program then.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import inf

import pulp

from .assignment import NoAssignment
from .solver import run_solver

_SCALE = 1e6  # microseconds
_ROUNDING = 1e-12  # of sums of seconds
_FEW_BINARIES = 200  # of a program that is solved for several stages per rank
_MOST_BINARIES = 2000  # of one for ranks that differ
_NEGLIGIBLE = 1e-3  # of a step
_MOST_COLUMNS = 500  # of a program that is solved for one stage per rank


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

    def used_bytes(self, stage: int, first: int = 0, last: int | None = None) -> list[float]:
        """What units [first, last) take of a stage's memory, each."""
        untouched, halfway = self.alive(stage)
        sizes = self.held_bytes, self.kept_bytes, self.remade_bytes or self.kept_bytes
        units = zip(*(each[first:last] for each in sizes), strict=True)
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
    slowest = 0.0
    used = [0.0] * len(cutting.rank_of)
    for stage, (first, last) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if last <= first:
            return inf
        used[cutting.rank_of[stage]] += sum(cutting.used_bytes(stage, first, last))
        slowest = max(slowest, cutting.pace_of(stage) * sum(cutting.seconds[first:last]))
    if any(size > cutting.room_of(rank) for rank, size in enumerate(used) if size):
        return inf
    return cutting.weight * slowest + sum(cutting.cut_seconds[end - 1] for end in ends)


def best_cut(cutting: Cutting, *, time_limit_seconds: float | None = None) -> tuple[int, ...]:
    """The best ends of all stages but the last, in units; of large pipelines those with the shortest slowest stage.

    Raises:
        NoAssignment: too few units, or nothing fits.
    """
    has_several, alike = cutting.num_stages > len(set(cutting.rank_of)), cutting.are_ranks_alike
    most = _FEW_BINARIES if has_several else _MOST_COLUMNS if alike else _MOST_BINARIES
    is_large = cutting.num_stages * len(cutting.seconds) > most
    rooms = replace(cutting, room_bytes=inf) if has_several else cutting
    ends = cut_evenly(rooms, may_be_empty=not alike)
    price = objective(cutting, ends)
    if price < inf and (has_several or is_large or _most_saved(cutting, ends) <= _NEGLIGIBLE * price):
        return ends
    if is_large:
        ends = cut_evenly(rooms)
        if objective(cutting, ends) == inf:
            raise NoAssignment
        return ends
    if has_several:
        by_rank = [[s for s, at in enumerate(cutting.rank_of) if at == rank] for rank in sorted({*cutting.rank_of})]
        remade = cutting.remade_bytes or cutting.kept_bytes
        units = Counter(zip(cutting.held_bytes, cutting.kept_bytes, remade, strict=True))
        alive = [cutting.alive(s) for s in range(cutting.num_stages)]
        if least_fullest(units, alive=alive, by_rank=by_rank) > cutting.room_bytes:
            raise NoAssignment
    return cut_by_ilp(cutting, time_limit_seconds=time_limit_seconds)


def _most_saved(cutting: Cutting, ends: Sequence[int]) -> float:
    """What another cut saves at most where no slowest stage is faster: the price of its cuts over the cheapest."""
    cheapest = min(cutting.cut_seconds[:-1], default=0.0)
    return sum(cutting.cut_seconds[end - 1] - cheapest for end in ends)


def least_fullest(
    units: Mapping[tuple[float, float, float], int],
    *,
    alive: Sequence[tuple[int, int]],
    by_rank: Sequence[Sequence[int]],
) -> float:
    """Bytes that the fullest rank has at least, whatever the cut. `units`: how many there are by the bytes that they
    hold, keep, and keep when all has been made again; `alive`: as `Cutting.alive`; `by_rank`: the stages of every rank.

    For any weights l_r >= 0 of the ranks that add up to 1 it has at least sum_r l_r (bytes of r), and that is no less
    than sum_u min_s l_r(s) (W_u + (f_s - h_s) A_u + h_s R_u). Weights in inverse proportion to W + f_r A of the whole
    model, with f_r the mean of the rank's stages, make all ranks of equal units alike.
    """
    held, kept, _ = (sum(count * unit[i] for unit, count in units.items()) for i in range(3))
    weights: list[float] = []
    stages: set[tuple[float, int, int]] = set()
    for mine in by_rank:
        flight = sum(sum(alive[s]) for s in mine) / len(mine)
        weights.append(1 / max(1.0, held + flight * kept))
        stages.update((weights[-1], *alive[s]) for s in mine)
    least = sum(
        count * min(weight * (unit_held + f * unit_kept + h * remade) for weight, f, h in stages)
        for (unit_held, unit_kept, remade), count in units.items()
    )
    return least / sum(weights)


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


def cut_by_ilp(cutting: Cutting, *, time_limit_seconds: float | None = None) -> tuple[int, ...]:
    """The best ends of all stages but the last, in units.

    Raises:
        NoAssignment: too few units, or nothing fits.
    """
    units, stages = len(cutting.seconds), cutting.num_stages
    if units < stages:
        raise NoAssignment
    if stages == 1:
        if objective(cutting, ()) == inf:
            raise NoAssignment
        return ()
    time = (0.0, *accumulate(cutting.seconds))
    lp = pulp.LpProblem("stages", pulp.LpMinimize)
    slowest = lp.add_variable("T", 0)
    cuts = {
        (s, k): lp.add_variable(f"c{s:04d}_{k:05d}", 0, 1, pulp.LpInteger)
        for s in range(stages - 1)
        for k in range(s + 1, units - (stages - 2 - s))
    }
    terms = [(slowest, cutting.weight)]
    terms += [(column, cutting.cut_seconds[k - 1] * _SCALE + 1e-6 * k) for (_, k), column in cuts.items()]
    lp.setObjective(pulp.LpAffineExpression(terms))

    def difference(s: int, weights: Sequence[float], scale: float) -> tuple[list[tuple[pulp.LpVariable, float]], float]:
        """sum_k w_k (c[s,k] - c[s-1,k]) as terms and a constant."""
        found = [(column, weights[k] * scale) for (t, k), column in cuts.items() if t == s]
        found += [(column, -weights[k] * scale) for (t, k), column in cuts.items() if t == s - 1]
        return found, weights[units] * scale if s == stages - 1 else 0.0

    def at_most(columns: list[tuple[pulp.LpVariable, float]], limit: float) -> None:
        lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(columns), pulp.LpConstraintLE, rhs=limit))

    order = tuple(float(k) for k in range(units + 1))
    room = max(cutting.room_bytes, 1.0)
    memory: dict[int, tuple[list[tuple[pulp.LpVariable, float]], float]] = {}
    for s in range(stages):
        if s < stages - 1:
            column_sum = [(column, 1.0) for (t, _), column in cuts.items() if t == s]
            lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(column_sum), pulp.LpConstraintEQ, rhs=1))
        columns, constant = difference(s, order, -1.0)
        at_most(columns, -1.0 - constant)
        columns, constant = difference(s, time, _SCALE * cutting.pace_of(s))
        at_most([*columns, (slowest, -1.0)], -constant)
        used = (0.0, *accumulate(cutting.used_bytes(s)))
        columns, constant = difference(s, used, 1 / room)
        before, already = memory.get(cutting.rank_of[s], ([], 0.0))
        memory[cutting.rank_of[s]] = [*before, *columns], already + constant
    for rank, (columns, constant) in memory.items():
        at_most(columns, cutting.room_of(rank) / room - constant)
    run_solver(lp, as_mip=True, time_limit_seconds=time_limit_seconds)
    found = {s: k for (s, k), column in cuts.items() if (column.varValue or 0.0) > 0.5}
    ends = tuple(found[s] for s in range(stages - 1))
    if objective(cutting, ends) == inf:
        raise NoAssignment
    return ends


def cut_by_search(cutting: Cutting) -> tuple[int, ...]:
    """The same by dynamic programming: for each possible slowest stage the cheapest cuts that stay below it.

    Raises:
        NoAssignment: too few units, or nothing fits.
    """
    units, stages = len(cutting.seconds), cutting.num_stages
    time = (0.0, *accumulate(cutting.seconds))
    paces = {cutting.pace_of(stage) for stage in range(stages)}
    runs = {time[b] - time[a] for a in range(units) for b in range(a + 1, units + 1)}
    limits = sorted({run * pace for run in runs for pace in paces})
    best: tuple[float, tuple[int, ...]] = (inf, ())
    low, high = 0, len(limits) - 1
    # Below the first feasible limit nothing fits; above, cuts may get cheaper while T grows: try till T alone is worse.
    while low < high:
        middle = (low + high) // 2
        if _cheapest(cutting, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    for limit in limits[low:]:
        if cutting.weight * limit >= best[0]:
            break
        ends = _cheapest(cutting, limit)
        if ends is not None:
            best = min(best, (objective(cutting, ends), ends))
            if not any(cutting.cut_seconds):
                break
    if best[0] == inf:
        raise NoAssignment
    assert len(best[1]) == stages - 1
    return best[1]


def _cheapest(cutting: Cutting, limit: float) -> tuple[int, ...] | None:
    """Ends with the least price of cuts whose stages take at most `limit` seconds and fit."""
    units, stages = len(cutting.seconds), cutting.num_stages
    time = (0.0, *accumulate(cutting.seconds))
    front: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for s in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        sums = (0.0, *accumulate(cutting.used_bytes(s)))
        for first, (price, ends) in front.items():
            for last in range(first + 1, units - (stages - 1 - s) + 1):
                used = sums[last] - sums[first]
                seconds = (time[last] - time[first]) * cutting.pace_of(s)
                if seconds > limit * (1 + 1e-12) or used > cutting.room_of(cutting.rank_of[s]):
                    break
                if s == stages - 1:
                    if last == units:
                        following[units] = min(following.get(units, (inf, ())), (price, ends))
                    continue
                candidate = (price + cutting.cut_seconds[last - 1], (*ends, last))
                following[last] = min(following.get(last, (inf, ())), candidate)
        front = following
    return front[units][1] if units in front else None
