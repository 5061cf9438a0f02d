"""From a model file to a plan; the expected placements come from the integer program alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from autopar.compiler.package import render_package
from autopar.cost_models.errors import AutoparError
from autopar.planner.capture.graph import Kind
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.errors import UnsupportedModel
from autopar.planner.placements import placements_of, program_of
from autopar.planner.plan import Plan

# Of a pinned mesh: what the bound leaves out are gradients added up where a value has several readers, and little else.
LARGEST_GAP = 0.05
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
    found, graph = plan("mlp", mesh={"pp": 1, "dp": 8, "tp": 1})
    template, node = next((t, n) for t, p in found.placements.items() for n in p)

    def edited(name: str, node_name: str, axis: str, label: str) -> Plan:
        return replace(found, placements={**found.placements, name: {node_name: {axis: label}}})

    for bad, message in (
        (edited("Nobody", node, "dp", "R"), "Nobody"),
        (edited(template, "nobody", "dp", "R"), "nobody"),
        (edited(template, node, "xp", "R"), "xp"),
        (edited(template, node, "dp", "S(9)"), "S(9)"),
    ):
        with pytest.raises(AutoparError) as error:
            placements_of(bad, graph)
        assert message in str(error.value)


def test_a_change_of_layout_that_does_not_exist_between_blocks_is_refused():
    found, graph = plan("mlp", mesh={"pp": 1, "dp": 8, "tp": 1})
    first, second = found.placements["Linear"], found.placements["Linear1"]
    edited = {"Linear": {**first, "relu": {"dp": "grad"}}, "Linear1": {**second, "x": {"dp": "P/R"}}}
    with pytest.raises(UnsupportedModel, match="cannot be lowered: there is no conversion from R/P to P/R"):
        program_of(replace(found, placements={**found.placements, **edited}), graph)


def test_inputs_that_ranks_do_not_get_so_are_refused():
    found, graph = plan("mlp", mesh={"pp": 1, "dp": 4, "tp": 2})
    prelude, inputs = graph.templates[0].name, [node.name for node in graph.templates[0].of_kind(Kind.INPUT)]
    for axis, label in (("dp", "R/P"), ("tp", "S(0)"), ("tp", "P/R")):
        placed = found.placements[prelude]
        chosen = {name: {**at, axis: label} if name in inputs else at for name, at in placed.items()}
        with pytest.raises(AutoparError, match=f" is {re.escape(label)} on {axis}, and ranks get it as "):
            placements_of(replace(found, placements={**found.placements, prelude: chosen}), graph)


def test_a_parameter_that_zero_would_add_up_too_often_is_refused():
    found, graph = plan("llama", mesh={"pp": 1, "dp": 4, "cp": 2, "tp": 1}, zero=3)
    template = next(t for t in graph.templates if t.of_kind(Kind.PARAMETER) and t.name in found.placements)
    node = template.of_kind(Kind.PARAMETER)[0].name
    chosen = dict(found.placements[template.name])
    for axis in ("dp", "cp"):
        for labels in ({**chosen[node], axis: "R"}, {k: v for k, v in chosen[node].items() if k != axis}):
            bad = replace(found, placements={**found.placements, template.name: {**chosen, node: labels}})
            with pytest.raises(AutoparError, match=f"{node} is R on {axis}"):
                placements_of(bad, graph)
            # Without ZeRO nothing is added up that the placement does not ask for.
            placements_of(replace(bad, zero=0), graph)


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
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_llama_gets_column_and_row_splits_sequence_parallelism_and_a_split_vocabulary(precision):
    arguments = {"preset": "8b", "context": 4096}
    found, graph = plan(
        "llama", arguments=arguments, batch_size=8, precision=precision, mesh={"pp": 1, "dp": 1, "tp": 8}
    )
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
    assert found.solver.gap_fraction < LARGEST_GAP


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt_gets_column_and_row_splits_sequence_parallelism_and_a_split_vocabulary(precision):
    arguments = {"preset": "1.3b", "context": 4096}
    found, graph = plan("gpt", arguments=arguments, batch_size=8, precision=precision, mesh={"pp": 1, "dp": 1, "tp": 8})
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


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "pair"), [(100, "S(0)"), (32, "S(1)")])
def test_tables_are_split_by_rows_where_features_do_not_divide(rank, pair):
    """10^8 users. Eight ranks cannot split 100 features, so they split rows and add up partial lookups. Of 32 features
    each takes 4: then the products of features are added up, B numbers instead of B vectors, which is cheaper."""
    arguments = {"num_users": 10**8, "rank": rank}
    found, _ = plan("matrix_factorization", arguments=arguments, batch_size=65536, mesh={"pp": 1, "dp": 1, "tp": 8})
    pairs = on_tp(found)
    assert (pairs["users.weight"], pairs["user_bias.weight"]) == (pair, "S(0)")


@pytest.mark.slow
def test_a_residual_network_on_large_images_splits_space_or_channels():
    inputs = {"images": "float32[B,3,1024,1024]", "labels": "int64[B]"}
    found, graph = plan("resnet", inputs=inputs, batch_size=2, mesh={"pp": 1, "dp": 1, "tp": 8})
    convolutions = [
        (template, node) for template in graph.templates for node in template.nodes if node.op == "aten.conv2d.default"
    ]
    assert convolutions
    for template, node in convolutions:
        label = found.placements[template.name].get(node.name, {}).get("tp", "none")
        assert label not in ("none", "grad"), f"{template.name}: {node.name} is computed whole"


def test_a_buffer_that_the_step_replaces_is_whole(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.up = nn.Linear(8, 16)\n        self.down = nn.Linear(16, 8)\n"
        '        self.register_buffer("average", torch.zeros(16))\n'
        "    def forward(self, x):\n        z = self.up(x).tanh()\n        with torch.no_grad():\n"
        "            self.average.mul_(0.9).add_(z.mean(0) * 0.1)\n"
        "        return self.down(z - self.average).square().mean()\n\n\n"
        "def example_inputs(batch_size: int = 8):\n    return (torch.randn(batch_size, 8),)\n"
    )
    planned = make_plan(PlanRequest(model=str(tmp_path / "net.py"), gpus=4, mesh={"dp": 2, "tp": 2}))
    assert "average" in render_package(planned.plan, planned.graph)["sharded_model.py"]
