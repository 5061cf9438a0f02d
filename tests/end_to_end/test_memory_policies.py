"""ZeRO-1, shards within groups of dp, and selective checkpointing: values and collectives verified on small models."""

from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"

pytestmark = pytest.mark.gloo


def check(folder: Path, model: str, mesh: dict[str, int], *, batch_size: int, arguments=None, **pins):
    request = PlanRequest(
        model=str(SAMPLES / f"{model}.py"),
        arguments=arguments or {},
        gpus=prod(mesh.values()),
        batch_size=batch_size,
        mesh=mesh,
        **pins,
    )
    made = make_plan(request)
    emit_package(made.plan, made.graph, folder / "package", force=False)
    report = verify(made.plan, folder / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9
    return made.plan, (folder / "package" / "sharded_model.py").read_text()


def test_zero_1_updates_parts_and_gathers_them(tmp_path):
    plan, text = check(tmp_path, "mlp", {"dp": 2, "tp": 2}, batch_size=64, zero=1, microbatch_size=16)
    ops = {line.op for line in plan.collectives if line.reason == "zero1"}
    assert ops == {"all_gather", "reduce_scatter"}
    assert "fully_shard" not in text


def test_shards_within_groups(tmp_path):
    plan, text = check(tmp_path, "mlp", {"dp": 4}, batch_size=64, zero=3, zero_shard_size=2, microbatch_size=8)
    assert plan.zero_shard_size == 2
    assert {line.axis for line in plan.collectives if line.reason == "fsdp"} == {"dp_shard", "dp_replicate"}
    assert "REPLICAS = 2" in text


def test_selective_checkpointing_keeps_products(tmp_path):
    small = {"num_layers": 2, "context": 16}
    pins = {"activation_checkpoint": "selective", "arguments": small}
    plan, text = check(tmp_path, "llama", {"tp": 2}, batch_size=4, **pins)
    assert any(line.reason == "recompute" for line in plan.collectives)
    assert "torch.ops.aten.mm.default" in text
