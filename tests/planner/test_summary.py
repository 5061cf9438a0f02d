"""A plan in lines: what was decided, and for what."""

from __future__ import annotations

from dataclasses import replace

from autopar.planner.plan import Plan
from autopar.planner.plan_json import plan_from_json, plan_to_json, rounded
from autopar.planner.summary import decision_line, repriced_line, setting_line


def test_says_where_a_plan_priced_again_does_not_fit(example_plan: Plan) -> None:
    plan = replace(example_plan, memory_capacity_bytes=7 * 2**30)
    assert repriced_line(example_plan, replace(plan, step_seconds=0.3)) == (
        "150 ms -> 300 ms a step, 8 GiB of 7 GiB on the fullest GPU, which does not fit"
    )


def test_facts_that_the_user_gave_stay_with_the_plan(example_plan: Plan) -> None:
    plan = example_plan
    assert "cluster_overrides" not in plan_to_json(plan)
    given = replace(plan, cluster_overrides={"hbm_gib": 40.0})
    assert plan_from_json(plan_to_json(given), where="a test") == rounded(given)
    assert "hbm_gib=40" in setting_line(given)


def test_shares_of_the_batch_stay_with_the_plan(example_plan: Plan) -> None:
    plan = replace(example_plan, batch_shares=(6, 2))
    assert "batch_shares" not in plan_to_json(example_plan)
    assert plan_from_json(plan_to_json(plan), where="a test") == rounded(plan)
    assert "6 and 2 microbatches of 2 samples by dp rank" in decision_line(plan)
