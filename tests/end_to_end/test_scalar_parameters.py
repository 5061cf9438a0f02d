"""Parameters without dims (logit scales, gates, temperatures) beside ZeRO: no rank need hold them whole."""

from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package, render_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

GATED = Path(__file__).resolve().parents[1] / "cases" / "scalar_parameters.py"


def planned(mesh, **pins):
    return make_plan(PlanRequest(model=f"{GATED}:build", gpus=prod(mesh.values()), mesh=mesh, **pins))


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 2}, {"zero": 3}),
        ({"dp": 2, "tp": 2}, {"zero": 2, "microbatch_size": 4}),
        pytest.param({"dp": 4}, {"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"dp": 4}, {"zero": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 2}, {"zero": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 4}, {"zero": 2, "zero_shard_size": 2, "microbatch_size": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {"zero": 1, "schedule": "1f1b"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {"zero": 2, "schedule": "zero-bubble"}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "dp": 2},
            {"zero": 3, "schedule": "1f1b", "microbatch_size": 2, "activation_checkpoint": "full"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"pp": 2, "dp": 2, "tp": 2}, {"zero": 3, "schedule": "interleaved"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_scalars_are_exact_under_every_stage(tmp_path, mesh, pins):
    made = planned(mesh, batch_size=16, **pins)
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9


def test_checkpoints_of_all_plans_hold_scalars_alike():
    """With one dim in every plan, so that one plan's checkpoint can be resumed by another."""
    one, other = planned({"dp": 2}, zero=0), planned({"dp": 2}, zero=3)
    for made in (one, other):
        text = render_package(made.plan, made.graph)["sharded_model.py"]
        assert "self.logit_scale = parameter(1)" in text
        assert 'user_shapes = {"logit_scale": (), "bias": ()}' in text


def test_each_rank_has_room_for_a_scalar_in_what_is_gathered():
    gates = [line for line in planned({"dp": 2}, zero=3).plan.collectives if line.reason == "fsdp"]
    numbers = 16 + 16 + (32 * 16 + 32) + (16 * 32 + 16)
    assert {(line.op, line.num_bytes) for line in gates} >= {
        ("all_gather", 4 * (numbers + 2)), ("reduce_scatter", 4 * (numbers + 2))
    }  # fmt: skip
