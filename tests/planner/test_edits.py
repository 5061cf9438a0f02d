"""A plan edited by hand has the predictions of the same plan made by pins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autopar.compiler.package import after_edits
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.edits import completed, was_edited
from autopar.planner.errors import AutoparError, UnsupportedModel
from autopar.planner.plan_json import rounded

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
GPT = {"num_layers": 4, "context": 16}


def planned(model: str, **given: Any):
    mesh = {"pp": 1, "dp": 1, "tp": 1, **given.pop("mesh")}
    found = make_plan(PlanRequest(model=str(SAMPLES / f"{model}.py"), mesh=mesh, batch_size=16, **given))
    return rounded(found.plan), found.graph


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": 4, "mesh": {"dp": 2, "tp": 2}},
        {"gpus": 4, "mesh": {"dp": 4}, "zero": 3, "zero_shard_size": 2},
        {"gpus": 4, "mesh": {"dp": 2, "cp": 2}, "zero": 1},
        {"gpus": 4, "mesh": {"dp": 2, "pp": 2}, "schedule": "interleaved", "stages_per_rank": 2, "microbatch_size": 2},
        {"gpus": 2, "mesh": {"dp": 2}, "zero": "h.{0..1}=2,*=3", "activation_checkpoint": "h.{0..2}=full,*=none"},
        {"gpus": 2, "mesh": {"dp": 2}, "zero": 0, "microbatch_size": 1, "slow_ranks": {1: 3.0}},
    ],
    ids=str,
)
def test_a_plan_that_nobody_edited_stays_as_it_is(given: dict[str, Any]) -> None:
    plan, graph = planned("gpt", arguments=GPT, **given)
    assert after_edits(plan, graph) is plan


def test_shares_of_the_batch_are_those_of_the_plan() -> None:
    given: dict[str, Any] = {"gpus": 2, "mesh": {"dp": 2}, "zero": 0, "microbatch_size": 1, "slow_ranks": {1: 3.0}}
    plan, graph = planned("gpt", arguments=GPT, **given)
    assert plan.batch_shares == (12, 4)
    assert after_edits(plan, graph) is plan
    even, _ = planned("gpt", arguments=GPT, **given, batch_shares=(1, 1))
    found = rounded(after_edits(replace(plan, batch_shares=()), graph))
    assert found == replace(even, solver=found.solver, alternatives=plan.alternatives, pins=plan.pins)
    pinned = replace(plan, batch_shares=(), pins={**plan.pins, "batch-shares": "6,2"})
    assert after_edits(pinned, graph).pins["batch-shares"] == "8,8"


@pytest.mark.parametrize(
    ("first", "edit", "pins"),
    [
        ({"zero": 0, "microbatch_size": 2}, {"zero": 3}, {"zero": 3, "microbatch_size": 2}),
        ({"zero": 0, "microbatch_size": 2}, {"microbatches": 2}, {"zero": 0, "microbatch_size": 4}),
        (
            {"zero": 2, "microbatch_size": 2},
            {"activation_checkpoint": "full", "schedule": "1f1b"},
            {"zero": 2, "microbatch_size": 2, "activation_checkpoint": "full", "schedule": "1f1b"},
        ),
    ],
    ids=str,
)
def test_an_edited_plan_says_what_the_same_plan_by_pins_says(
    first: dict[str, Any], edit: dict[str, Any], pins: dict[str, Any]
) -> None:
    given: dict[str, Any] = {"arguments": GPT, "gpus": 4, "mesh": {"pp": 2, "dp": 2}}
    rest: dict[str, Any] = {"schedule": "gpipe", "stages_per_rank": 1, "activation_checkpoint": "none"}
    plan, graph = planned("gpt", **given, **{**rest, **first})
    wanted, _ = planned("gpt", **given, **{**rest, **pins})
    found = rounded(after_edits(replace(plan, **edit), graph))
    assert found.step_seconds != plan.step_seconds
    assert found.solver.status == "priced again"
    assert found == replace(wanted, solver=found.solver, alternatives=plan.alternatives, notes=plan.notes)


def test_microbatches_of_a_plan_that_had_one() -> None:
    plan, graph = planned("mlp", gpus=2, mesh={"dp": 2}, zero=0, microbatch_size=8)
    wanted, _ = planned("mlp", gpus=2, mesh={"dp": 2}, zero=0, microbatch_size=2)
    found = rounded(after_edits(replace(plan, microbatches=4), graph))
    assert found.collectives == wanted.collectives
    assert found.placements == wanted.placements
    assert found.step_seconds == wanted.step_seconds


def test_placements_that_do_not_go_with_microbatches_are_refused_with_the_command() -> None:
    plan, graph = planned("gpt", arguments=GPT, gpus=4, mesh={"pp": 2, "dp": 2}, zero=0, microbatch_size=8)
    with pytest.raises(UnsupportedModel, match="placed for one microbatch does not go with 4") as refused:
        after_edits(replace(plan, microbatches=4), graph)
    assert refused.value.fix.startswith(f"plan anew: autopar plan {SAMPLES / 'gpt.py'}:build --gpus 4 --batch-size 16 ")
    assert " --set context=16 --set num_layers=4 --mesh pp=2,dp=2,tp=1 --microbatch-size 2 " in refused.value.fix


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    plan, graph = planned("resnet", gpus=2, mesh={"dp": 2})
    assert completed(plan, graph) is plan
    with pytest.raises(AutoparError, match="cannot be cut into 2 microbatches: .*whole batch at once"):
        completed(replace(plan, microbatches=2), graph)


@pytest.mark.parametrize(
    ("edit", "pins"),
    [
        ({"zero": 0}, {"mesh": "pp=1,dp=2,tp=1", "zero": "0", "activation-checkpoint": "h.{0..2}=full"}),
        (
            {
                "zero_by_block": {"h.{0..1}": 2, "h.{2..3}": 3},
                "activation_checkpoint": "none",
                "checkpoint_by_block": {},
            },
            {
                "mesh": "pp=1,dp=2,tp=1",
                "zero": "h.{0..1}=2,h.{2..3}=3",
                "zero-shard-size": "2",
                "activation-checkpoint": "none",
            },
        ),
    ],
    ids=str,
)
def test_pins_follow_an_edit(edit: dict[str, Any], pins: dict[str, str]) -> None:
    plan, graph = planned(
        "gpt",
        arguments=GPT,
        gpus=2,
        mesh={"dp": 2},
        zero=3,
        zero_shard_size=2,
        activation_checkpoint="h.{0..2}=full",
    )
    assert not was_edited(plan, graph)
    edited = replace(plan, **edit)
    assert was_edited(edited, graph)
    found = rounded(after_edits(edited, graph))
    assert found.pins == pins
    assert was_edited(found, graph)
    assert after_edits(found, graph) is found
    assert not was_edited(replace(edited, fingerprint="of another model"), graph)
