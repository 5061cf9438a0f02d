"""A time limit: the best plan so far, and an honest word on how good it is."""

from dataclasses import replace

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.search.answer import Setting
from autopar.planner.search.candidates import Pins
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


def test_time_enough_changes_nothing():
    limited = search(replace(SETTING, time_limit_seconds=600.0))
    free = search(SETTING)
    assert limited.is_complete
    assert (limited.best.mesh, limited.best.cost.step_seconds) == (free.best.mesh, free.best.cost.step_seconds)
    assert limited.bound_seconds == free.bound_seconds
