"""Diff of plans: what changed in a plan's own words, and the rules of --fail-on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from autopar.planner.diff import (
    PlacementChange,
    SettingChange,
    StageChange,
    TensorEvent,
    diff_plans,
    diff_to_json,
    expand,
)
from autopar.planner.diff_tables import diff_tables, diff_to_markdown, headline
from autopar.planner.plan import Plan
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def with_time(plan: Plan, seconds: float) -> Plan:
    return replace(plan, step_seconds=seconds)


def deeper(plan: Plan) -> Plan:
    """The same plan of a model with 10 blocks instead of 8."""
    last = replace(plan.stages[1], last=14, fqns=("h.{4..9}", "ln_f", "lm_head"))
    return replace(plan, stages=(plan.stages[0], last))


def test_same_plan_is_an_empty_diff(example_plan: Plan) -> None:
    again = replace(example_plan, autopar_version="9", fingerprint="other", notes=("note",), pins={})
    diff = diff_plans(example_plan, again)
    assert diff.is_empty
    assert headline(diff) == "The plans are the same."


def test_only_predictions(example_plan: Plan) -> None:
    diff = diff_plans(example_plan, with_time(example_plan, 0.18))
    assert diff.is_same_decision
    assert not diff.is_empty
    assert headline(diff) == "Same decision; predicted step time +20.0%."


def test_mesh_axis_missing_is_size_one(example_plan: Plan) -> None:
    old = replace(example_plan, mesh={"dp": 4, "tp": 2})
    new = replace(example_plan, mesh={"pp": 2, "dp": 2, "tp": 2, "cp": 1})
    assert diff_plans(old, new).settings == (
        SettingChange(section="mesh", name="pp", old="1", new="2"),
        SettingChange(section="mesh", name="dp", old="4", new="2"),
    )


def test_shares_of_the_batch(example_plan: Plan) -> None:
    (change,) = diff_plans(example_plan, replace(example_plan, batch_shares=(6, 2))).settings
    assert (change.section, change.name, change.old, change.new) == ("batch", "batch_shares", "even", "6 and 2")


def test_model_path_is_no_change_but_arguments_are(example_plan: Plan) -> None:
    elsewhere = replace(example_plan, model=replace(example_plan.model, path="/other/gpt.py"))
    assert diff_plans(example_plan, elsewhere).is_empty
    bigger = replace(example_plan, model=replace(example_plan.model, arguments={"preset": "124m"}))
    (change,) = diff_plans(example_plan, bigger).settings
    assert (change.section, change.new) == ("model", 'build preset="124m"')


def test_deeper_model_adds_its_blocks(example_plan: Plan) -> None:
    diff = diff_plans(example_plan, deeper(example_plan))
    assert {(c.fqn, c.event) for c in diff.tensors} == {
        ("h.{8..9}.attn.c_attn.weight", TensorEvent.ADDED),
        ("h.{8..9}.mlp.c_proj.weight", TensorEvent.ADDED),
    }
    assert diff.stages == (
        StageChange(stage=1, old=("h.{4..7}", "ln_f", "lm_head"), new=("h.{4..9}", "ln_f", "lm_head")),
    )


def test_block_planned_by_itself(example_plan: Plan) -> None:
    """Exact names win over the pattern: h.0 is split otherwise, h.1 to h.7 as before."""
    alone = {"h.0.mlp.c_proj.weight": {"dp": "R/P", "tp": "R"}}
    new = replace(
        example_plan,
        tensors={**example_plan.tensors, **alone},
        tensor_shapes={**example_plan.tensor_shapes, "h.0.mlp.c_proj.weight": (64, 256)},
    )
    (change,) = diff_plans(example_plan, new).tensors
    assert change.fqn == "h.0.mlp.c_proj.weight"
    assert change.event is TensorEvent.MOVED
    assert (change.old_placement, change.new_placement) == ("tp S(1)", "whole")


def test_the_same_split_written_per_block_is_no_change(example_plan: Plan) -> None:
    pattern = "h.*.mlp.c_proj.weight"
    names = [f"h.{i}.mlp.c_proj.weight" for i in range(8)]
    tensors = {**{n: example_plan.tensors[pattern] for n in names}, **example_plan.tensors}
    shapes = {**{n: example_plan.tensor_shapes[pattern] for n in names}, **example_plan.tensor_shapes}
    del tensors[pattern], shapes[pattern]
    assert diff_plans(example_plan, replace(example_plan, tensors=tensors, tensor_shapes=shapes)).is_empty


def test_resized_and_removed(example_plan: Plan) -> None:
    shapes = {**example_plan.tensor_shapes, "wte.weight": (512, 64)}
    tensors = dict(example_plan.tensors)
    del tensors["ln_f.weight"], shapes["ln_f.weight"]
    diff = diff_plans(example_plan, replace(example_plan, tensors=tensors, tensor_shapes=shapes))
    assert [(c.fqn, c.event, c.old_shape, c.new_shape) for c in diff.tensors] == [
        ("ln_f.weight", TensorEvent.REMOVED, (64,), None),
        ("wte.weight", TensorEvent.RESIZED, (256, 64), (512, 64)),
    ]


def test_operation_placements(example_plan: Plan) -> None:
    new = {
        "Block": {**example_plan.placements["Block"], "attn.c_attn.linear": {"dp": "b"}},
        "Head": {"linear": {"tp": "n"}},
        "Embedding": example_plan.placements["Embedding"],
    }
    diff = diff_plans(example_plan, replace(example_plan, placements=new))
    assert diff.placements == (
        PlacementChange(template="Block", node="attn.c_attn.linear", axis="tp", old="n", new="none"),
        PlacementChange(template="Head", node="linear", axis="tp", old="none", new="n"),
    )


def test_a_newly_split_axis_is_one_row(example_plan: Plan) -> None:
    nodes = {f"op{i}": {"tp": "n"} for i in range(5)}
    whole, split = replace(example_plan, placements={}), replace(example_plan, placements={"Block": nodes})
    there, back = diff_plans(whole, split), diff_plans(split, whole)
    assert len(there.placements) == len(back.placements) == 5
    assert diff_tables(there)[-1].rows == (("Block", "5 operations", "tp", "none", "split"),)
    assert diff_tables(back)[-1].rows == (("Block", "5 operations", "tp", "split", "none"),)


def test_gradient_sums_are_no_place(example_plan: Plan) -> None:
    new = {**example_plan.tensors, "ln_f.weight": {"tp": "R"}}
    assert diff_plans(example_plan, replace(example_plan, tensors=new)).is_empty


def test_stage_that_went_away(example_plan: Plan) -> None:
    one = replace(example_plan.stages[0], last=12, fqns=("wte", "h.{0..7}", "ln_f", "lm_head"))
    diff = diff_plans(example_plan, replace(example_plan, stages=(one,)))
    assert diff.stages[1] == StageChange(stage=1, old=("h.{4..7}", "ln_f", "lm_head"), new=())


def test_measures(example_plan: Plan) -> None:
    cheaper = replace(example_plan, collectives=example_plan.collectives[:1])
    measures = {m.name: m for m in diff_plans(example_plan, cheaper).measures}
    assert measures["communication"].old == 16 * 4096 + 4 * 65536
    assert measures["communication"].new == 16 * 4096
    assert measures["communication.dp"].change_fraction == -1
    assert measures["communication.tp"].change_fraction == 0
    assert {m.name: m for m in diff_plans(cheaper, example_plan).measures}["communication.dp"].change_fraction is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h.{0..2}.x", ("h.0.x", "h.1.x", "h.2.x")), ("ln_f", ("ln_f",)), ("h.{7..7}", ("h.7",))],
)
def test_expand(text: str, expected: tuple[str, ...]) -> None:
    assert expand(text) == expected


def test_json(example_plan: Plan) -> None:
    data = json.loads(diff_to_json(diff_plans(example_plan, deeper(with_time(example_plan, 0.3)))))
    assert data["schema_version"] == 1
    assert data["measures"][0] == {
        "name": "step_time", "unit": "seconds", "old": 0.15, "new": 0.3, "change_fraction": 1.0,
    }  # fmt: skip
    assert {c["event"] for c in data["tensors"]} == {"added"}


def test_markdown(example_plan: Plan) -> None:
    new = replace(deeper(with_time(example_plan, 0.3)), mesh={"pp": 2, "dp": 1, "tp": 4})
    text = diff_to_markdown(diff_plans(example_plan, new), old="old.json", new="new.json")
    assert "### autopar: `old.json` -> `new.json`" in text
    assert "| step time | 150 ms | 300 ms | +100.0% |" in text
    assert "| mesh dp | 2 | 1 |" in text
    assert "| h.{8..9}.attn.c\\_attn.weight | added | - | 192x64 tp S(0;3) |" in text


def test_markdown_of_hostile_names(example_plan: Plan) -> None:
    new = replace(
        example_plan,
        tensors={**example_plan.tensors, "a|b<script>": {}},
        tensor_shapes={**example_plan.tensor_shapes, "a|b<script>": ()},
    )
    text = diff_to_markdown(diff_plans(example_plan, new), old="a", new="b")
    assert "| a\\|b&lt;script> | added | - | scalar whole |" in text


def test_long_tables_fold_in_markdown(example_plan: Plan) -> None:
    many = {f"p{i}": {"tp": "S(0)"} for i in range(20)}
    text = diff_to_markdown(diff_plans(example_plan, replace(example_plan, tensors=many)), old="a", new="b")
    assert "<details><summary>Parameters (" in text


names = st.lists(st.sampled_from(["wte.weight", "h.*.a", "h.0.a", "h.*.b.c", "ln.weight"]), unique=True)
pairs = st.sampled_from(["R", "R/P", "S(0)", "S(1)"])


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_diff_is_antisymmetric(example_plan: Plan, data: st.DataObject) -> None:
    """Swapping the plans swaps added with removed and old with new, and nothing else."""
    old, new = (
        replace(
            example_plan,
            tensors={name: {"tp": data.draw(pairs)} for name in data.draw(names)},
            mesh={"pp": 1, "dp": data.draw(st.integers(1, 4)), "tp": 2},
        )
        for _ in range(2)
    )
    there, back = diff_plans(old, new), diff_plans(new, old)
    swapped = {TensorEvent.ADDED: TensorEvent.REMOVED, TensorEvent.REMOVED: TensorEvent.ADDED}
    assert {(c.fqn, c.event, c.old_placement, c.new_placement) for c in there.tensors} == {
        (c.fqn, swapped.get(c.event, c.event), c.new_placement, c.old_placement) for c in back.tensors
    }
    assert [(c.name, c.old, c.new) for c in there.settings] == [(c.name, c.new, c.old) for c in back.settings]
    assert diff_plans(old, old).is_empty


def test_tables_leave_out_empty_sections(example_plan: Plan) -> None:
    tables = diff_tables(diff_plans(example_plan, with_time(example_plan, 0.2)))
    assert [table.title for table in tables] == ["Predicted"]
