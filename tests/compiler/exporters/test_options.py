"""Policies that no code can be written for are refused, never emitted as something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from autopar.compiler.exporters.pytorch import options_of
from autopar.planner.errors import AutoparError
from autopar.planner.plan_json import read_plan

PLAN = Path(__file__).parents[1] / "golden" / "gpt_pp4_dropout" / "plan.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero": 4}, "zero=4"),
        ({"activation_checkpoint": "most"}, "activation_checkpoint=most"),
        ({"schedule": "dual"}, "schedule=dual"),
        ({"schedule": "interleaved"}, "at least 2 stages per rank"),
    ],
)
def test_policies_without_code_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(AutoparError, match=message) as caught:
        options_of(replace(read_plan(PLAN), **changes))
    assert "choose" in str(caught.value.fix)


def test_schedule_that_cannot_run_is_refused() -> None:
    plan = read_plan(PLAN)
    for schedule, microbatches, message in (("1f1b", 1, "1 for 4"), ("none", plan.microbatches, "no pipeline")):
        with pytest.raises(AutoparError, match=message):
            options_of(replace(plan, schedule=schedule, microbatches=microbatches))


def test_predictions_are_those_of_the_plan() -> None:
    plan = read_plan(PLAN)
    options = options_of(plan)
    assert len(options.stage_seconds) == len(plan.stages) == 4
    assert sum(options.step_seconds.values()) == pytest.approx(plan.step_seconds, rel=0.05)
