"""What units take under each policy of recomputation -> the fewest seconds with which some cut may fit in memory.

With W_u the bytes that a unit holds, A_up and t_up the bytes that it keeps of a microbatch and the seconds that it
takes under policy p, R_u what it keeps when all has been made again, f_s microbatches in flight at stage s, of h_s of
which that is so, and M_r the memory of rank r, a cut and policies that fit have, for any weights l_r >= 0 of the ranks,

    sum_u min_s l_r(s) (W_u + (f_s - h_s) A_up(u) + h_s R_u) <= sum_r l_r M_r

Given l this is a knapsack: each unit chooses one policy, with its seconds and its bytes on the left. Its relaxation is
solved by taking what spares most bytes a second first. Weights in inverse proportion to W + f_r A of the whole model
make the ranks of equal units alike (`least_fullest`); A depends on the policies, so that it is taken from the answer
before. Every answer is a bound, and the largest counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from ..schedules import Alive

_ROUNDS = 3  # of weights
_ROUNDING = 1e-9  # of sums of bytes

_Point = tuple[float, ...]


class Recomputed(NamedTuple):
    """A unit: bytes that it holds, keeps of a microbatch when all has been made again, and by policy the bytes that it
    keeps of a microbatch and the seconds it takes."""

    held_bytes: float
    remade_bytes: float
    kept_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


def least_recomputed(
    units: Mapping[Recomputed, int],
    *,
    alive: Sequence[Alive],
    by_rank: Sequence[Sequence[int]],
    room_bytes: Sequence[float],
) -> float:
    """Seconds that all units take at least, for one microbatch, where every rank fits; inf where none may.

    `units`: each kind, and how many there are. `alive`: microbatches of every stage. `by_rank`: the stages of every
    rank. `room_bytes`: of every rank.
    """
    held = sum(count * unit.held_bytes for unit, count in units.items())
    kept = sum(count * unit.kept_bytes[0] for unit, count in units.items())
    found = 0.0
    for _ in range(_ROUNDS):
        weights = [1 / max(1.0, held + kept * sum(alive[s].total for s in mine) / len(mine)) for mine in by_rank]
        stages = {
            (weight, weight * alive[s].untouched, weight * alive[s].halfway)
            for weight, mine in zip(weights, by_rank, strict=True)
            for s in mine
        }
        room = sum(weight * size for weight, size in zip(weights, room_bytes, strict=True))
        seconds, kept = _knapsack(units, _lowest(stages), room)
        found = max(found, seconds)
        if found == inf:
            break
    return found


def _knapsack(units: Mapping[Recomputed, int], stages: Sequence[_Point], room: float) -> tuple[float, float]:
    """The fewest seconds with weighted bytes within `room`, and the bytes that are then kept of a microbatch."""
    seconds = kept = 0.0
    missing = -room
    steps: list[tuple[float, float, float, float]] = []  # seconds a weighted byte, seconds, weighted bytes, bytes
    for unit, count in units.items():
        points = _hull(
            (time, min(w * unit.held_bytes + f * size + h * unit.remade_bytes for w, f, h in stages), size)
            for time, size in zip(unit.seconds, unit.kept_bytes, strict=True)
        )
        time, weighted, size = points[0]
        seconds, kept, missing = seconds + count * time, kept + count * size, missing + count * weighted
        for point in points[1:]:
            more, spared, dropped = point[0] - time, weighted - point[1], size - point[2]
            steps.append((more / spared, count * more, count * spared, count * dropped))
            time, weighted, size = point
    for _, more, spared, dropped in sorted(steps):
        if missing <= 0:
            break
        part = min(1.0, missing / spared)
        seconds, missing, kept = seconds + part * more, missing - part * spared, kept - part * dropped
    return (seconds, kept) if missing <= _ROUNDING * room else (inf, kept)


def _lowest(stages: Iterable[_Point]) -> list[_Point]:
    """Of stages those that a unit may take least on."""
    points = sorted(stages)
    if not any(halfway for _, _, halfway in points):
        return [(*point, 0.0) for point in _hull(point[:2] for point in points)]
    return points


def _hull(points: Iterable[_Point]) -> list[_Point]:
    """Of points in a plane those that are lowest for some weights of both coordinates, the first one growing."""
    found: list[_Point] = []
    for point in sorted(points):
        if found and point[1] >= found[-1][1]:
            continue
        while len(found) > 1 and _turns_up(found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return found


def _turns_up(a: _Point, b: _Point, c: _Point) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
