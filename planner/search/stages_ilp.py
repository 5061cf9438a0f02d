"""Where to cut the units into pipeline stages: a small integer program over cut positions.

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
variables.

Where every cut costs the same, or nearly so, only T is left to decide, and no program is needed (`filling.py`), but
where ranks differ and the filling leaves a stage empty. (For models too large for the program the fullest stages that
are not empty do then.)

With several stages per rank the most even cut is taken where it fits: memory alone is worth a program then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf

import pulp

from .assignment import NoAssignment
from .cutting import Cutting, objective
from .filling import cut_evenly
from .solver import run_solver

_SCALE = 1e6  # microseconds
_FEW_BINARIES = 200  # of a program that is solved for several stages per rank
_MOST_BINARIES = 2000  # of one for ranks that differ
_NEGLIGIBLE = 1e-3  # of a step
_MOST_COLUMNS = 500  # of a program that is solved for one stage per rank


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
    step = price + sum(cutting.seconds)
    if price < inf and (has_several or is_large or _most_saved(cutting, ends) <= _NEGLIGIBLE * step):
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
    """What another cut saves at most where no slowest stage is faster: the price of its cuts over the cheapest ones."""
    cheapest = sorted(cutting.cut_seconds[:-1])[: len(ends)]
    return sum(cutting.cut_seconds[end - 1] for end in ends) - sum(cheapest)


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
