"""The rules of --fail-on: which differences break them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar.planner.diff import diff_plans
from autopar.planner.errors import AutoparError, CheckFailed
from autopar.planner.fail_on import broken_rules, check_fail_on, parse_fail_on
from autopar.planner.plan import Plan


def with_time(plan: Plan, seconds: float) -> Plan:
    return replace(plan, step_seconds=seconds)


@pytest.mark.parametrize(
    ("rules", "seconds", "broken"),
    [
        ("step_time>5%", 0.158, ["step_time: +5.3%, limit +5%"]),
        ("step_time>5%", 0.157, []),
        ("step_time>5%", 0.05, []),
        ("step_time > 5.5 %,mesh", 0.158, []),
        ("memory>0%,communication>0%,communication.tp>0%,communication.none>1%", 9.0, []),
        ("mesh,schedule,stages,tensors,placements,batch,zero", 9.0, []),
    ],
)
def test_fail_on_step_time(example_plan: Plan, rules: str, seconds: float, broken: list[str]) -> None:
    diff = diff_plans(example_plan, with_time(example_plan, seconds))
    assert list(broken_rules(diff, parse_fail_on(rules))) == broken


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("mesh", {"mesh": {"pp": 1, "dp": 4, "tp": 2}}),
        ("schedule", {"schedule": "gpipe"}),
        ("batch", {"microbatches": 8}),
        ("batch", {"batch_size": 32}),
        ("zero", {"zero": 3}),
        ("precision", {"precision": "bf16"}),
        ("optimizer", {"optimizer": "sgd"}),
        ("cluster", {"cluster": "a100-80g-sxm"}),
        ("activation_checkpoint", {"activation_checkpoint": "full"}),
        ("tensors", {"tensors": {}}),
        ("placements", {"placements": {}}),
    ],
)
def test_fail_on_section(example_plan: Plan, rule: str, change: dict[str, object]) -> None:
    diff = diff_plans(example_plan, replace(example_plan, **change))
    with pytest.raises(CheckFailed, match=rule) as caught:
        check_fail_on(diff, parse_fail_on(f"step_time>1%,{rule}"))
    assert caught.value.exit_code == 5
    check_fail_on(diff, parse_fail_on("step_time>1%,stages"))


def test_something_from_nothing_breaks_a_limit(example_plan: Plan) -> None:
    silent = replace(example_plan, collectives=())
    diff = diff_plans(silent, example_plan)
    assert broken_rules(diff, parse_fail_on("communication.dp>50%")) == ("communication.dp: from nothing, limit +50%",)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot read ''"),
        ("step_time>5", "cannot read 'step_time>5'"),
        ("step_time<5%", "cannot read"),
        ("speed>5%", "unknown name 'speed'"),
        ("step_time", "step_time needs a limit"),
        ("mesh>5%", "mesh is no number"),
    ],
)
def test_bad_fail_on(text: str, what: str) -> None:
    with pytest.raises(AutoparError, match=what) as caught:
        parse_fail_on(text)
    assert caught.value.exit_code == 2
