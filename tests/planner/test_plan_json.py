"""plan.json: byte-stable, read back as it was, and every bad edit answered with its path and what is allowed."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from autopar.planner.errors import AutoparError
from autopar.planner.plan import IS_OPTIONAL, Plan
from autopar.planner.plan_checks import schema
from autopar.planner.plan_json import plan_from_json, plan_to_json, read_plan, relative_to, rounded
from autopar.planner.schedules import schedule_names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

finite = st.floats(min_value=0, max_value=1e12, allow_nan=False)
names = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12)


@given(
    seconds=finite,
    breakdown=st.dictionaries(names, finite, max_size=4),
    arguments=st.dictionaries(
        names, st.none() | st.booleans() | st.integers() | finite | st.text(max_size=9), max_size=4
    ),
    notes=st.lists(st.text(max_size=200), max_size=3),
    shape=st.lists(st.integers(0, 2**40), max_size=4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(
    example_plan: Plan,
    seconds: float,
    breakdown: dict[str, float],
    arguments: dict[str, Any],
    notes: list[str],
    shape: list[int],
) -> None:
    plan = replace(
        example_plan,
        step_seconds=seconds,
        time_breakdown_seconds=breakdown,
        model=replace(example_plan.model, arguments=arguments),
        notes=tuple(notes),
        tensor_shapes={**example_plan.tensor_shapes, "wte.weight": tuple(shape)},
    )
    text = plan_to_json(plan)
    back = plan_from_json(text, where="plan.json")
    assert back == rounded(plan)
    assert plan_to_json(back) == text
    assert abs(back.step_seconds - seconds) <= 1e-5 * seconds


def test_bytes_do_not_depend_on_the_order_of_mappings(example_plan: Plan) -> None:
    turned = replace(
        example_plan,
        mesh=dict(reversed(example_plan.mesh.items())),
        placements=dict(reversed(example_plan.placements.items())),
        tensors=dict(reversed(example_plan.tensors.items())),
    )
    assert plan_to_json(turned) == plan_to_json(example_plan)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"zero": 3, "zero_by_block": {"h.{0..3}": 2, "h.4": 2}}, "$.zero_by_block says 2 of all blocks"),
        (
            {"activation_checkpoint": "mixed", "checkpoint_by_block": {"h.{0..3}": "full"}},
            '$.checkpoint_by_block says "full" of all blocks',
        ),
    ],
)
def test_a_mix_of_one_is_none(example_plan: Plan, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(AutoparError) as caught:
        plan_from_json(plan_to_json(replace(example_plan, **changes)), where="edited.json")
    assert caught.value.what == what
    assert caught.value.fix.startswith("leave it out")


def test_layout_of_the_file(example_plan: Plan) -> None:
    text = plan_to_json(example_plan)
    lines = text.splitlines()
    assert '  "mesh": {"dp": 2, "pp": 2, "tp": 2},' in lines
    assert '      "attn.c_attn.linear": {"dp": "b", "tp": "n"},' in lines
    assert max(map(len, lines)) <= 120
    assert text.endswith("}\n")
    assert text.isascii()


def test_infinite_numbers_are_not_written(example_plan: Plan) -> None:
    with pytest.raises(ValueError, match="inf"):
        plan_to_json(replace(example_plan, step_seconds=float("inf")))


def test_schema_is_a_schema() -> None:
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(dict(schema()))
    optional = {field.name for field in fields(Plan) if field.metadata.get(IS_OPTIONAL)}
    assert set(schema()["required"]) == set(schema()["properties"]) - optional


EDITS = [
    (("mesh", "tp"), 0, "$.mesh.tp is 0", "at least 1"),
    (("mesh", "tp"), 2.0, "$.mesh.tp is 2.0", "integer"),
    (("mesh", "tp"), True, "$.mesh.tp is true", "integer"),
    (("mesh", "tp"), 4, "= 16 ranks, but $.gpus is 8", "product"),
    (("precision",), "fp8", '$.precision is "fp8"', '"bf16"'),
    (("zero",), 4, "$.zero is 4", "0, 1, 2, 3"),
    (("schedule",), "none", '$.schedule is "none" with pp=2', "pipeline schedule"),
    (("schedule",), 'x"; import os', "$.schedule is", "1f1b"),
    (("microbatches",), 3, "$.batch_size 16 does not divide over dp=2 x 3", "divide"),
    (("batch_shares",), [7, 2], "$.batch_shares is [7, 2] with 4 microbatches: they do not deal out 8", "leave"),
    (("batch_shares",), [4, 4], "all are equal", "leave"),
    (("batch_shares",), [8], "$.batch_shares is [8]", "mend it"),
    (("zero_by_block",), {}, "$.zero_by_block names no block", "$.zero"),
    (("checkpoint_by_block",), {}, "$.checkpoint_by_block names no block", "$.activation_checkpoint"),
    (("stages", 1, "first"), 7, "$.stages[1].first is 7, but stage 0 ends at 6", "without gap"),
    (("stages", 1, "rank"), 2, "$.stages[1].rank is 2, but $.mesh.pp is 2", "the first is 0"),
    (("stages", 0, "last"), 1, "$.stages[0] holds no unit", "at least one"),
    (("stages", 0, "memory_bytes"), {}, "$.stages[0].memory_bytes lacks total", "add it"),
    (("tensors", "wte.weight", "tp"), "S0", '$.tensors["wte.weight"].tp is "S0"', "S(dim)"),
    (("placements", "Block", "attn.c_attn.linear", "tp"), "n'\n", "$.placements.Block", "option"),
    (("step_seconds",), "fast", '$.step_seconds is "fast"', "number"),
    (("step_seconds",), -1, "$.step_seconds is -1", "at least 0"),
    (("model", "name"), "build(); evil", "$.model.name is", "name of a function"),
    (("microbatch",), 4, "unknown key 'microbatch'", "'microbatches'"),
    (("schema_version",), 2, "schema_version 2", "plan again"),
    (("schema_version",), True, "schema_version True", "plan again"),
    (("schema_version",), 1.0, "schema_version 1.0", "plan again"),
]


@pytest.mark.parametrize(
    ("path", "value", "what", "fix"), EDITS, ids=[f"{'.'.join(map(str, e[0]))}={e[1]}" for e in EDITS]
)
def test_bad_edit(example_plan: Plan, path: tuple[Any, ...], value: Any, what: str, fix: str) -> None:
    data = json.loads(plan_to_json(example_plan))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    with pytest.raises(AutoparError) as caught:
        plan_from_json(json.dumps(data), where="edited.json")
    assert what in caught.value.what
    assert fix in caught.value.fix
    assert caught.value.where == "edited.json"
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("key", sorted(schema()["required"]))
def test_missing_key(example_plan: Plan, key: str) -> None:
    data = json.loads(plan_to_json(example_plan))
    del data[key]
    with pytest.raises(AutoparError, match=key):
        plan_from_json(json.dumps(data), where="edited.json")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not valid JSON"),
        ("[1, 2]", "no schema_version"),
        ('{"a": 1, "a": 2}', "stands twice"),
        ('{"schema_version": NaN}', "NaN"),
        ('{"schema_version": 1e400}', "1e400"),
        (f'{{"schema_version": 1{"0" * 301}}}', "too large"),
        ('{"schema_version": ' + "9" * 5000 + "}", "not a plan: Exceeds the limit"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_not_a_plan(text: str, what: str) -> None:
    with pytest.raises(AutoparError, match=what):
        plan_from_json(text, where="x.json")


def test_line_of_a_syntax_error(example_plan: Plan) -> None:
    lines = plan_to_json(example_plan).splitlines()
    lines[4] = lines[4].replace('"', "", 1)
    with pytest.raises(AutoparError) as caught:
        plan_from_json("\n".join(lines), where="x.json")
    assert "line 5" in caught.value.where


def test_paths_follow_the_file(example_plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "gpt-autopar").mkdir()
    model = tmp_path / "gpt.py"
    plan = replace(
        example_plan,
        cluster=str(tmp_path / "my.toml"),
        stack=str(tmp_path / "own.toml"),
        model=replace(example_plan.model, path=str(model)),
    )
    written = relative_to(plan, tmp_path / "gpt-autopar")
    assert written.model.path == "../gpt.py"
    assert (written.cluster, written.stack) == ("../my.toml", "../own.toml")
    file = tmp_path / "gpt-autopar" / "plan.json"
    file.write_text(plan_to_json(written))
    assert read_plan(file).model.path == str(model)
    assert read_plan(file).cluster == str(tmp_path / "my.toml")
    assert read_plan(file).stack == str(tmp_path / "own.toml")


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="cannot read the plan"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(AutoparError, match="UTF-8"):
        read_plan(tmp_path / "binary.json")


def test_a_mesh_is_read_in_its_own_order(example_plan: Plan) -> None:
    assert list(plan_from_json(plan_to_json(example_plan), where="plan.json").mesh) == ["pp", "dp", "tp"]


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "none"])
def test_every_schedule_can_be_read_back(example_plan: Plan, schedule: str) -> None:
    plan = replace(example_plan, schedule=schedule)
    assert plan_from_json(plan_to_json(plan), where="plan.json").schedule == schedule
