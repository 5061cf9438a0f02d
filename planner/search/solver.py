"""PuLP model -> solved by HiGHS.

PuLP hands HiGHS its model column by column and row by row, and looks for new columns in every row three times. Programs
here are many and small, so that takes longer than solving them: the whole model is handed over at once instead.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import pulp

from ...cost_models.errors import AutoparError
from .assignment import NoAssignment, Stopped

# Relaxations here are nearly integral and soon solved as they are: presolve, and exact edge weights, take longer.
_OF_RELAXATIONS = {"presolve": "off", "simplex_dual_edge_weight_strategy": 1}


# Where only what beats a known value is of interest, the root relaxation mostly tells: presolve takes most of the time.
_OF_CUTOFFS = {"presolve": "off", "mip_max_nodes": 200}


def run_solver(
    lp: pulp.LpProblem, *, as_mip: bool, time_limit_seconds: float | None = None, cutoff: float = inf
) -> None:
    """Solve on one thread, silent and repeatable.

    `cutoff`: an integer program ends once nothing below it is left, with any value that is not below it or infeasible;
    and after some nodes, which is `Stopped` or not optimal.

    Raises:
        NoAssignment: infeasible.
        Stopped: no solution within the limits; of a linear program, no optimal one.
        AutoparError: HiGHS is not installed.
    """
    options: dict[str, Any] = {"mip_rel_gap": 1e-9} if as_mip else dict(_OF_RELAXATIONS)
    if as_mip and cutoff < inf:
        options |= {**_OF_CUTOFFS, "objective_bound": cutoff}
    solver: Any = _HiGHS(mip=as_mip, msg=False, threads=1, timeLimit=time_limit_seconds, **options)
    if not solver.available():
        raise AutoparError("the solver HiGHS is missing", fix="pip install highspy")
    with _quiet_stdout():
        lp.solve(solver)
    if lp.status == pulp.LpStatusNotSolved:
        raise Stopped
    if lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise NoAssignment


class _HiGHS(pulp.HiGHS):
    """PuLP's HiGHS with the model handed over, and the values read, in one piece."""

    def actualSolve(self, lp: pulp.LpProblem) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.createAndConfigureSolver(lp)
        highs: Any = lp.solverModel
        columns = _columns_of(lp)
        highs.passModel(_as_arrays(lp, columns, as_mip=self.mip))
        highs.run()
        for column, value in zip(columns, highs.getSolution().col_value, strict=True):
            column.varValue = value
        status, solution = _STATUS.get(highs.getModelStatus().name, (pulp.LpStatusNotSolved, _NOTHING))
        is_stopped = solution == pulp.LpSolutionIntegerFeasible
        if is_stopped and (not self.mip or highs.getObjectiveValue() == inf):  # before there was a solution
            status, solution = pulp.LpStatusNotSolved, _NOTHING
        lp.assignStatus(status, solution)
        return status


_NOTHING = pulp.LpSolutionNoSolutionFound
_STATUS = {
    "kOptimal": (pulp.LpStatusOptimal, pulp.LpSolutionOptimal),
    "kInfeasible": (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible),
    "kUnboundedOrInfeasible": (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible),
    "kSolutionLimit": (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible),
    "kTimeLimit": (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible),
    "kInterrupt": (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible),
}


def _columns_of(lp: pulp.LpProblem) -> list[Any]:
    """Every column by name. PuLP's own list would look at each column of each row once more."""
    rows: Iterable[Any] = lp.constraints()
    objective: Any = lp.objective
    found = {column.hash: column for expression in (*rows, objective) for column in expression}
    return sorted(found.values(), key=lambda column: column.name)


def _as_arrays(lp: pulp.LpProblem, columns: Sequence[Any], *, as_mip: bool) -> Any:
    """The program as HiGHS holds it: bounds and prices by column, rows one after the other."""
    import highspy

    found = highspy.HighsLp()
    position = {column.hash: index for index, column in enumerate(columns)}
    objective: Any = lp.objective
    prices = [0.0] * len(columns)
    for column, price in objective.items():
        prices[position[column.hash]] = float(price)
    found.num_col_ = len(columns)
    found.col_cost_ = prices
    found.col_lower_ = [-inf if column.lowBound is None else column.lowBound for column in columns]
    found.col_upper_ = [inf if column.upBound is None else column.upBound for column in columns]
    if as_mip:
        kinds = highspy.HighsVarType
        found.integrality_ = [
            kinds.kInteger if column.cat == pulp.LpInteger else kinds.kContinuous for column in columns
        ]
    starts, indices, values = [0], [], []
    lower: list[float] = []
    upper: list[float] = []
    rows: Iterable[Any] = lp.constraints()
    for row in rows:
        for column, factor in row.items():
            if factor:
                indices.append(position[column.hash])
                values.append(float(factor))
        starts.append(len(indices))
        low, high = row.getLb(), row.getUb()
        lower.append(-inf if low is None else low)
        upper.append(inf if high is None else high)
    found.num_row_ = len(lower)
    found.row_lower_, found.row_upper_ = lower, upper
    found.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    found.a_matrix_.start_, found.a_matrix_.index_, found.a_matrix_.value_ = starts, indices, values
    return found


@contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Keep the C library's stdout away from ours: HiGHS prints its name at the first run, whatever its options say."""
    sys.stdout.flush()
    try:
        ours = os.dup(1)
    except OSError:  # no stdout at all
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(ours, 1)
        os.close(ours)
        os.close(nothing)
