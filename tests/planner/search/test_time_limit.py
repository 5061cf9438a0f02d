"""A time limit: the best plan so far, and an honest word on how good it is."""

from dataclasses import replace
from itertools import count
from math import inf
from types import SimpleNamespace

import pulp
import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.search import placements_ilp, step_model, sweep
from autopar.planner.search.answer import Setting
from autopar.planner.search.assignment import Stopped
from autopar.planner.search.pins import Pins
from autopar.planner.search.solver import run_solver
from autopar.planner.search.sweep import search
from graphs import residual_mlp

SETTING = Setting(
    graph=residual_mlp(batch=64, width=512, hidden=2048, depth=3), gpus=8, cluster=load_cluster("h100-sxm"),
    stack=load_stack("eager"), precision="fp32", optimizer="adamw", pins=Pins(mesh={}),
)  # fmt: skip


@pytest.mark.parametrize("is_exact", [False, True])
def test_no_time_at_all_still_gives_a_plan_with_its_gap(is_exact):
    found = search(replace(SETTING, time_limit_seconds=1e-9, exact=is_exact))
    assert found.best.fits
    assert not found.is_complete
    assert 0 < found.bound_seconds < found.best.cost.step_seconds
    assert found.bound_seconds <= search(SETTING).best.cost.step_seconds


@pytest.mark.parametrize("as_mip", [False, True])
def test_a_program_ends_with_its_time(as_mip):
    lp = pulp.LpProblem("market", pulp.LpMinimize)
    columns = [lp.add_variable(f"x{k}", 0, 1, pulp.LpInteger) for k in range(40)]
    lp.setObjective(pulp.LpAffineExpression([(columns[0], 1.0)]))
    for row in range(1, 6):  # half of every sum, which only a long search finds
        weights = [(7919 * row * (k + 3) ** 2) % 97 for k in range(40)]
        terms = [(column, float(weight)) for column, weight in zip(columns, weights, strict=True)]
        lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintEQ, rhs=sum(weights) // 2))
    with pytest.raises(Stopped):
        run_solver(lp, as_mip=as_mip, time_limit_seconds=0.0)


@pytest.mark.parametrize("is_exact", [False, True])
def test_programs_are_given_what_is_left_once_a_plan_is_known(monkeypatch, is_exact):
    clock, given = count(), []

    def stopped(lp, *, as_mip, time_limit_seconds=None, cutoff=inf):
        given.append(time_limit_seconds)
        if time_limit_seconds is not None:
            raise Stopped
        run_solver(lp, as_mip=as_mip, cutoff=cutoff)

    monkeypatch.setattr(sweep, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    for module in (placements_ilp, step_model):
        monkeypatch.setattr(module, "run_solver", stopped)
    found = search(replace(SETTING, time_limit_seconds=60.0, exact=is_exact))
    limits = [seconds for seconds in given if seconds is not None]
    assert given[0] is None
    assert limits == sorted(limits, reverse=True)
    assert all(0 <= seconds < 60 for seconds in limits)
    assert limits
    assert found.best.fits
    assert 0 < found.bound_seconds < found.best.cost.step_seconds
    assert not (is_exact and found.is_complete)


def test_time_enough_changes_nothing():
    limited = search(replace(SETTING, time_limit_seconds=600.0))
    free = search(SETTING)
    assert limited.is_complete
    assert (limited.best.mesh, limited.best.cost.step_seconds) == (free.best.mesh, free.best.cost.step_seconds)
    assert limited.bound_seconds == free.bound_seconds
