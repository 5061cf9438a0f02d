"""Policies by block: written as patterns, read back, said in words, refused where they are wrong."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from autopar.planner.blocks import blocks_of, by_pattern
from autopar.planner.checkpointing import by_unit, described, name_of, parse_checkpoints
from autopar.planner.diff import diff_plans
from autopar.planner.errors import AutoparError
from autopar.planner.fqn_patterns import fold
from autopar.planner.plan_json import plan_from_json, plan_to_json, rounded
from autopar.planner.search.pins import Pins
from autopar.planner.search.policies import checkpoints_for
from autopar.planner.summary import decision_line

sys.path.insert(0, str(Path(__file__).parent / "search"))
from graphs import residual_mlp

MIXED = {"h.{0..2}": "full", "h.3": "selective", "h.{4..7}": "none"}


def test_names_fold_where_their_numbers_follow():
    names = ["wte", "h.0", "h.1", "h.2", "h.4", "a.0", "ln", "ln"]
    assert fold(names) == ("wte", "h.{0..2}", "h.4", "a.0", "ln")


def test_pins_are_read_back_as_patterns_of_every_block():
    graph = residual_mlp(depth=4)
    first, *_, last = blocks_of(graph)
    found = by_unit(graph, {first: "full", last: "selective"}, where="", default="none")
    assert isinstance(found, tuple)
    assert name_of(found) == "mixed"
    patterns = by_pattern(graph, found)
    assert by_unit(graph, patterns, where="") == found
    assert set(patterns.values()) == {"full", "selective", "none"}
    text = ",".join(f"{pattern}={policy}" for pattern, policy in patterns.items())
    assert checkpoints_for(graph, Pins(mesh={}, activation_checkpoint=text)) == (found,)


def test_blocks_that_are_alike_are_no_mix():
    graph = residual_mlp(depth=3)
    every = dict.fromkeys(blocks_of(graph), "full")
    assert by_unit(graph, every, where="") == "full"
    assert by_pattern(graph, "full") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h.0", "cannot be emitted"),
        ("h.0=most", "h.0=most"),
        ("h.0=full,h.0=none", "twice"),
        ("h.{0..99999999}=full", "cannot be emitted"),
    ],
)
def test_pins_that_say_nothing(text, message):
    with pytest.raises(AutoparError, match=message):
        parse_checkpoints(text, where="")


def test_blocks_that_are_not_there_are_named():
    with pytest.raises(AutoparError, match="there is no block 'h.77'"):
        by_unit(residual_mlp(depth=3), {"h.77": "full"}, where="", default="none")


def test_words():
    assert described(MIXED) == "3 of 8 blocks recomputed in full, 1 but for products and attention"
    assert described({"h.0": "selective", "h.1": "none"}) == ("1 of 2 blocks recomputed but for products and attention")
    assert described({}) == ""


def test_a_plan_keeps_and_tells_its_mix(example_plan):
    plan = rounded(replace(example_plan, activation_checkpoint="mixed", checkpoint_by_block=MIXED))
    assert plan_from_json(plan_to_json(plan), where="") == plan
    assert decision_line(plan).endswith("3 of 8 blocks recomputed in full, 1 but for products and attention")
    (change,) = diff_plans(example_plan, plan).settings
    assert (change.section, change.old) == ("activation_checkpoint", "none")
    assert change.new == "3 of 8 blocks recomputed in full (h.{0..2}), 1 but for products and attention (h.3)"
    spelled = replace(plan, checkpoint_by_block={**MIXED, "h.{0..2}": "full"})
    assert diff_plans(plan, spelled).is_same_decision


@pytest.mark.parametrize(
    ("name", "by_block", "message"),
    [
        ("full", MIXED, "activation_checkpoint"),
        ("mixed", {}, "activation_checkpoint"),
        ("mixed", {"h.0": "full", "h.{0..3}": "none"}, "twice"),
        ("mixed", {"h.0": "most"}, "most"),
        ("mixed", {"h.{0..9999999}": "full"}, "h.{0..9999999}"),
    ],
)
def test_plans_that_contradict_themselves(example_plan, name, by_block, message):
    text = plan_to_json(replace(example_plan, activation_checkpoint=name, checkpoint_by_block=by_block))
    with pytest.raises(AutoparError, match=message.replace("{", "\\{").replace("}", "\\}")):
        plan_from_json(text, where="plan.json")
