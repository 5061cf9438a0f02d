"""From a model file to a plan; the expected placements come from the integer program alone."""

from pathlib import Path

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.planner.driver import PlanRequest, make_plan, placements_of, program_of
from autopar.planner.plan import Plan

MODELS = Path(__file__).parents[2] / "sample_models"


def plan(model: str, **options) -> tuple[Plan, object]:
    planned = make_plan(PlanRequest(model=str(MODELS / f"{model}.py"), gpus=8, **options))
    return planned.plan, planned.graph


def on_tp(found: Plan) -> dict[str, str]:
    return {name: axes.get("tp", "R") for name, axes in found.tensors.items()}


def test_plans_an_mlp_and_lowers_it():
    found, graph = plan("mlp", mesh={"pp": 2, "dp": 2, "tp": 2}, microbatch_size=4)
    assert found.mesh == {"pp": 2, "dp": 2, "tp": 2}
    assert found.microbatches == found.batch_size // 2 // 4
    assert sum(found.time_breakdown_seconds.values()) == pytest.approx(found.step_seconds)
    assert found.pins == {"mesh": "pp=2,dp=2,tp=2", "microbatch-size": "4"}
    assert program_of(found, graph).mesh.microbatches == found.microbatches
    assert plan("mlp", mesh={"pp": 2, "dp": 2, "tp": 2}, microbatch_size=4)[0] == found


def test_an_edited_plan_is_checked():
    from dataclasses import replace

    found, graph = plan("mlp", mesh={"pp": 1, "dp": 8, "tp": 1})
    template, node = next((t, n) for t, p in found.placements.items() for n in p)

    def edited(name: str, node_name: str, axis: str, label: str) -> Plan:
        return replace(found, placements={**found.placements, name: {node_name: {axis: label}}})

    for bad, message in (
        (edited("Nobody", node, "dp", "R"), "Nobody"),
        (edited(template, "nobody", "dp", "R"), "nobody"),
        (edited(template, node, "cp", "R"), "cp"),
        (edited(template, node, "dp", "S(9)"), "S(9)"),
    ):
        with pytest.raises(AutoparError) as error:
            placements_of(bad, graph)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "int8"),
        ({"cluster": "h1000"}, "h1000"),
        ({"optimizer": "sdg"}, "sdg"),
        ({"mesh": {"dp": 8}, "batch_size": 4}, "dp=8 does not divide batch 4"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(AutoparError) as error:
        plan("mlp", **options)
    assert message in str(error.value)


@pytest.mark.slow
def test_llama_gets_column_and_row_splits_sequence_parallelism_and_a_split_vocabulary():
    arguments = {"preset": "8b", "context": 4096}
    found, graph = plan("llama", arguments=arguments, batch_size=8, precision="bf16", mesh={"pp": 1, "dp": 1, "tp": 8})
    assert on_tp(found) == {
        "layers.*.attention.wq.weight": "S(0)",
        "layers.*.attention.wk.weight": "S(0)",
        "layers.*.attention.wv.weight": "S(0)",
        "layers.*.attention.wo.weight": "S(1)",
        "layers.*.attention_norm.weight": "R/P",
        "layers.*.feed_forward.w1.weight": "S(0)",
        "layers.*.feed_forward.w3.weight": "S(0)",
        "layers.*.feed_forward.w2.weight": "S(1)",
        "layers.*.ffn_norm.weight": "R/P",
        "norm.weight": "R/P",
        "output.weight": "S(0)",
        "tok_embeddings.weight": "S(1)",
    }
    block = next(t for t in graph.templates if t.is_module)
    assert found.placements[block.name]["x"]["tp"] == "S(1)"  # the residual stream, over the sequence


@pytest.mark.slow
def test_gpt_gets_column_and_row_splits_sequence_parallelism_and_a_split_vocabulary():
    arguments = {"preset": "1.3b", "context": 4096}
    found, graph = plan("gpt", arguments=arguments, batch_size=8, precision="bf16", mesh={"pp": 1, "dp": 1, "tp": 8})
    pairs = on_tp(found)
    assert {
        name: pairs[name] for name in pairs if name.endswith("weight") and "ln" not in name and "wpe" not in name
    } == {
        "h.*.attn.c_attn.weight": "S(0;3)",
        "h.*.attn.c_proj.weight": "S(1)",
        "h.*.mlp.c_fc.weight": "S(0)",
        "h.*.mlp.c_proj.weight": "S(1)",
        "wte.weight": "S(0)",
    }
    block = next(t for t in graph.templates if t.is_module)
    assert found.placements[block.name]["x"]["tp"] == "S(1)"
