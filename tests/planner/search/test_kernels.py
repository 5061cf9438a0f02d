from pathlib import Path

import pytest
from autopar.cost_models.stacks import Stack, load_stack
from autopar.cost_models.timeline import schedule_seconds
from autopar.cost_models.work import Pass
from autopar.planner.capture import capture_model
from autopar.planner.capture.graph import ModelGraph
from autopar.planner.schedules import action_table
from autopar.planner.search.kernels import stack_works
from autopar.planner.search.pipeline_seconds import simulated_seconds
from autopar.planner.search.problem import empty_placements
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.program import Compute, TemplateProgram, local_program

STACK = 'description = "d"\nsource = "s"\nfloat32_matmul = "ieee"\n'
SAMPLES = Path(__file__).parents[3] / "sample_models"


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    arguments = {"num_layers": 2, "dropout": 0.1}
    return capture_model(SAMPLES / "gpt.py", name="build", arguments=arguments, batch_size=4, guarded=False).graph


@pytest.fixture(scope="module")
def block(gpt: ModelGraph) -> TemplateProgram:
    index = next(t for t, template in enumerate(gpt.templates) if template.name == "Block")
    return local_program(gpt.templates[index], empty_placements(gpt)[index], Mesh())


def stack(folder: Path, text: str) -> Stack:
    path = folder / "stack.toml"
    path.write_text(STACK + text)
    load_stack.cache_clear()
    return load_stack(str(path))


def passes(program: TemplateProgram, chosen: Stack) -> dict[str, tuple[Pass, Pass]]:
    found = {}
    for step, work in zip(program.steps, stack_works(program, chosen), strict=True):
        if isinstance(step, Compute) and work is not None:
            found[step.node.name] = (work.forward, work.backward)
    return found


def test_hand_written_kernels_fuse_bias_dropout_and_residual(block: TemplateProgram, tmp_path: Path) -> None:
    fused = passes(block, stack(tmp_path, 'fusion = "kernels"\n'))
    elements = 4 * 64 * 64
    chain = ("attn.c_proj.add", "attn.resid_dropout.dropout", "add")
    # Reads the product and the residual, writes the sum and a mask of one byte; the bias is small.
    traffic = sum(fused[name][0].bytes for name in chain)
    assert traffic == pytest.approx((4 + 4 + 4 + 1) * elements, rel=0.01)
    assert sum(fused[name][0].kernels for name in chain) == 1
    assert fused["attn.c_attn.add"][0] == Pass()  # the bias of a product whose readers are views
    assert fused["mlp.gelu.gelu"][0].kernels == 0


def test_eager_fuses_only_biases(block: TemplateProgram, tmp_path: Path) -> None:
    eager = passes(block, stack(tmp_path, 'fusion = "eager"\n'))
    assert eager["mlp.c_fc.add"][0] == Pass()
    assert eager["mlp.gelu.gelu"][0].bytes == 2 * 4 * (4 * 64 * 256)
    assert eager["add"][0].bytes == 3 * 4 * (4 * 64 * 64)


def test_more_fusion_moves_fewer_bytes(block: TemplateProgram, tmp_path: Path) -> None:
    totals = {}
    for fusion in ("eager", "kernels", "compiled"):
        found = passes(block, stack(tmp_path, f'fusion = "{fusion}"\n'))
        totals[fusion] = [sum(part.bytes for part in side) for side in zip(*found.values(), strict=True)]
    assert totals["compiled"][0] <= totals["kernels"][0] < totals["eager"][0]
    assert max(totals["compiled"][1], totals["kernels"][1]) < totals["eager"][1]


def test_written_scores_are_products_and_traffic(block: TemplateProgram, tmp_path: Path) -> None:
    name = "attn.scaled_dot_product_attention"
    flash = passes(block, stack(tmp_path, 'fusion = "kernels"\n'))[name]
    written = passes(block, stack(tmp_path, 'fusion = "kernels"\nattention = "materialised"\n'))[name]
    assert flash[0].attention_flops > 0
    assert not flash[0].gemms
    assert written[0].attention_flops == 0
    # Every pair of tokens, where the fused kernel skips the masked half.
    assert sum(gemm.flops for gemm in written[0].gemms) == pytest.approx(2 * flash[0].attention_flops, rel=0.05)
    assert len(written[1].gemms) == 2 * len(written[0].gemms)
    scores = 4 * 8 * 64 * 64
    assert written[0].bytes > 11 * scores


def test_a_value_with_two_readers_adds_its_gradients(block: TemplateProgram, tmp_path: Path) -> None:
    eager = passes(block, stack(tmp_path, 'fusion = "eager"\n'))
    # The block's input is read by the first norm and the first residual.
    plain = 4 * 64 * 64 * 4
    assert eager["add"][1].bytes == 3 * plain


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 64), (4, 52), (8, 104), (3, 201)])
@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble-v", 2)],
)
def test_a_settled_pipeline_repeats_itself(schedule: str, per_rank: int, ranks: int, microbatches: int) -> None:
    durations = {}
    stages = ranks * per_rank
    for s in range(stages):
        durations[s, "F"] = 1.0 + 0.1 * (s % 3)
        durations[s, "B"] = 2.0 + 0.15 * (s % 2)
        durations[s, "I"], durations[s, "W"] = (0.0, 2.0) if s == 0 else (1.2, 0.8 + 0.15 * (s % 2))
    sends = [0.05] * (stages - 1)
    whole = schedule_seconds(action_table(schedule, ranks, microbatches, per_rank), durations, sends)
    assert simulated_seconds(schedule, ranks, microbatches, durations, sends) == pytest.approx(whole, rel=5e-4)


def test_one_rank_takes_as_long_for_each_microbatch() -> None:
    durations = {(0, "F"): 1.0, (0, "B"): 2.5}
    assert schedule_seconds(action_table("none", 1, 5), durations, []) == 5 * 3.5
    assert simulated_seconds("none", 1, 10**12, durations, []) == 10**12 * 3.5
