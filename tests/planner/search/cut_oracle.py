"""The best cut by dynamic programming over (stage, units), for one stage per rank."""

from __future__ import annotations

from itertools import accumulate
from math import inf

from autopar.planner.search.assignment import NoAssignment
from autopar.planner.search.cutting import Cutting, objective


def cut_by_search(cutting: Cutting) -> tuple[int, ...]:
    """For each possible slowest stage the cheapest cuts that stay below it.

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
