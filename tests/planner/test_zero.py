"""ZeRO stages by block: written as patterns, read back, said in words, refused where they are wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.planner.blocks import blocks_of, by_pattern, written
from autopar.planner.checkpointing import by_unit, parse_checkpoints
from autopar.planner.diff import diff_plans
from autopar.planner.errors import AutoparError
from autopar.planner.plan_json import plan_from_json, plan_to_json, rounded
from autopar.planner.replay import request_of
from autopar.planner.search.pins import Pins
from autopar.planner.search.policies import shardings_for
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.summary import decision_line
from autopar.planner.zero import highest, parse_zero, stages_by_unit

sys.path.insert(0, str(Path(__file__).parent / "search"))
from graphs import residual_mlp

MIXED = {"h.{0..2}": 2, "h.{3..7}": 3}


def test_pins_are_read_back_as_patterns_of_every_block():
    graph = residual_mlp(depth=4)
    first = blocks_of(graph)[0]
    stages = parse_zero(f"{first}=2,*=3", where="")
    found = stages_by_unit(graph, stages, where="")
    assert isinstance(found, tuple)
    assert highest(found) == 3
    text = written(by_pattern(graph, found))
    assert stages_by_unit(graph, parse_zero(text, where=""), where="") == found
    pins = Pins(mesh={}, zero=text)
    pins.check()
    assert shardings_for(graph, Mesh(dp=2), pins, load_cluster("h100-sxm")) == ((found, 1),)


def test_a_block_without_a_stage_is_named_as_it_was_written():
    graph = residual_mlp(depth=4)
    first, second, *_ = blocks_of(graph)
    with pytest.raises(AutoparError) as error:
        shardings_for(graph, Mesh(dp=2), Pins(mesh={}, zero=f"{first}=2"), load_cluster("h100-sxm"))
    assert error.value.fix.startswith(f"add {second}=3, or *=3")
    with pytest.raises(AutoparError) as error:
        stages_by_unit(graph, {first: 2}, where="plan.json")
    assert error.value.fix == f'add "{second}": 3'


def test_blocks_that_are_alike_are_no_mix():
    graph = residual_mlp(depth=3)
    assert stages_by_unit(graph, {"*": 2}, where="") == 2
    assert by_pattern(graph, 2) == {}


def test_the_others_have_a_policy_too():
    graph = residual_mlp(depth=3)
    first, *others = blocks_of(graph)
    policies = by_unit(graph, parse_checkpoints(f"{first}=none,*=full", where=""), where="", default="none")
    assert by_pattern(graph, policies) == {first: "none", **by_pattern_of(others, "full")}


def by_pattern_of(names, policy):
    from autopar.planner.fqn_patterns import fold

    return dict.fromkeys(fold(names), policy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h.0", "'h.0' cannot be emitted"),
        ("4", "ZeRO stage 4"),
        ("-1", "'-1' cannot be emitted"),
        ("h.0=4,*=3", "'h.0=4' cannot be emitted"),
        ("h.0=1,*=3", "ZeRO-1 is for all blocks or none"),
        ("h.0=2,h.0=3", "twice"),
        ("*=2,*=3", "twice"),
    ],
)
def test_pins_that_say_nothing(text, message):
    with pytest.raises(AutoparError, match=message.replace("*", "\\*")):
        parse_zero(text, where="")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({"h.77": 2, "*": 3}, "there is no block 'h.77'"),
        ({}, "no ZeRO stage"),
        ({"h.{2..0}": 2, "*": 3}, r"h\.\{2\.\.0\} names no block"),
    ],
)
def test_blocks_are_all_there_and_all_named(stages, message):
    with pytest.raises(AutoparError, match=message):
        stages_by_unit(residual_mlp(depth=3), stages, where="")


def test_a_plan_keeps_and_tells_its_mix(example_plan):
    uniform = replace(example_plan, zero=3)
    plan = rounded(replace(uniform, zero_by_block=MIXED, pins={"zero": "h.{0..2}=2,*=3"}))
    assert plan_from_json(plan_to_json(plan), where="") == plan
    assert request_of(plan).zero == "h.{0..2}=2,*=3"
    assert "ZeRO-3 but 2 in 3 of 8 blocks" in decision_line(plan)
    (change,) = diff_plans(uniform, plan).settings
    assert (change.section, change.old, change.new) == ("zero", "3", "3 but 2 in 3 of 8 blocks (h.{0..2})")


@pytest.mark.parametrize(
    ("zero", "by_block", "message"),
    [
        (2, MIXED, "zero_by_block names 8 blocks"),
        (3, {"h.0": 2, "h.{0..3}": 3}, "twice"),
        (3, {"h.0": 1}, "is 1"),
        (3, {"*": 2}, "zero_by_block"),
    ],
)
def test_plans_that_contradict_themselves(example_plan, zero, by_block, message):
    text = plan_to_json(replace(example_plan, zero=zero, zero_by_block=by_block))
    with pytest.raises(AutoparError, match=message):
        plan_from_json(text, where="plan.json")
