"""A plan back to its request: pins are read as they were written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar.planner.errors import AutoparError
from autopar.planner.plan import Plan
from autopar.planner.replay import command_of, parse_mesh


def test_mesh() -> None:
    assert parse_mesh("dp=2, tp=4", where="--mesh") == {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot read ''"),
        ("dp", "cannot read 'dp'"),
        ("xp=2", "no mesh axis 'xp'"),
        ("dp=2,dp=2", "given twice"),
        ("dp=0", "dp=0 is no size"),
        ("dp=-1", "no size"),
        ("dp=two", "no size"),
        ("dp=\u0662", "no size"),
    ],
)
def test_bad_mesh(text: str, what: str) -> None:
    with pytest.raises(AutoparError, match=what):
        parse_mesh(text, where="--mesh")


def test_the_command_of_a_decision(example_plan: Plan) -> None:
    plan = replace(
        example_plan,
        zero=3,
        zero_by_block={"h.{0..3}": 2, "h.{4..7}": 3},
        cluster_overrides={"hbm_gib": 40.0},
        pins={"slow": "rank=3:1.5"},
        batch_shares=(5, 3),
    )
    assert command_of(plan) == (
        "autopar plan gpt.py:build --gpus 8 --batch-size 16 --cluster h100-sxm --hbm-gib 40 --precision fp32 "
        "--optimizer adamw --stack eager --set preset=tiny --slow rank=3:1.5 --mesh pp=2,dp=2,tp=2 --microbatch-size 2 "
        "--batch-shares 5,3 --schedule 1f1b --stages-per-rank 1 --zero 'h.{0..3}=2,h.{4..7}=3' "
        "--activation-checkpoint none"
    )
