"""Context parallelism: the sequence of a Llama split over ranks, whole parameters, values and collectives verified."""

from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

LLAMA = Path(__file__).resolve().parents[2] / "sample_models" / "llama.py"
SMALL = {"num_layers": 2, "context": 16}

pytestmark = pytest.mark.gloo


def planned(mesh: dict[str, int], **pins):
    gpus = 1
    for size in mesh.values():
        gpus *= size
    return make_plan(PlanRequest(model=str(LLAMA), arguments=SMALL, gpus=gpus, batch_size=4, mesh=mesh, **pins))


def check(tmp_path: Path, mesh: dict[str, int], **pins) -> None:
    made = planned(mesh, **pins)
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9


def test_the_sequence_is_split_and_keys_are_gathered(tmp_path: Path) -> None:
    plan = planned({"cp": 2}).plan
    assert plan.mesh == {"pp": 1, "dp": 1, "cp": 2, "tp": 1}
    assert {tuple(pairs.items()) for pairs in plan.tensors.values()} == {(("cp", "R/P"),)}
    block = plan.placements["TransformerBlock"]
    assert block["x"] == {"cp": "S(1)"}
    assert block["attention.scaled_dot_product_attention"] == {"cp": "q"}
    gathers = [line for line in plan.collectives if line.op == "all_gather"]
    assert sum(line.count for line in gathers) == 2 * SMALL["num_layers"]  # keys and values of each layer
    check(tmp_path, {"cp": 2})


def test_zero_splits_states_over_cp_as_over_dp() -> None:
    """As torchtitan does: a rank holds a quarter, and no gradients are added up over cp alone."""
    over_both, over_dp = (planned(mesh, zero=3).plan for mesh in ({"dp": 2, "cp": 2}, {"dp": 4}))
    both, alone = (plan.stages[0].memory_bytes for plan in (over_both, over_dp))
    assert {name: both[name] for name in ("parameters", "gradients", "optimizer")} == {
        name: alone[name] for name in ("parameters", "gradients", "optimizer")
    }
    assert {line.axis for line in over_both.collectives if line.reason == "fsdp"} == {"dp_cp"}
    assert not [line for line in over_both.collectives if line.reason == "partial gradients"]


def test_whole_gradients_are_added_up_over_dp_and_cp_at_once() -> None:
    plans = {name: planned(mesh, zero=0).plan for name, mesh in {"dp_cp": {"dp": 2, "cp": 2}, "cp": {"cp": 4}}.items()}
    for name, plan in plans.items():
        (line,) = [line for line in plan.collectives if line.reason == "partial gradients"]
        assert (line.axis, line.op, line.count) == (name, "all_reduce", 1)
        # It is what ranks of dp would exchange; cp has keys and values.
        assert plan.time_breakdown_seconds["dp"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 0}),
        ({"pp": 2, "dp": 2, "cp": 2}, {"zero": 0, "schedule": "interleaved", "microbatch_size": 1}),
        ({"cp": 4}, {"zero": 2}),
        ({"cp": 2}, {"zero": 3, "microbatch_size": 2}),
        ({"dp": 2, "cp": 2}, {"zero": 3}),
        ({"dp": 4, "cp": 2}, {"zero": 3, "zero_shard_size": 4}),
        ({"dp": 2, "cp": 2}, {"zero": 3, "zero_shard_size": 2}),
        ({"cp": 2, "tp": 2}, {"zero": 1}),
        ({"pp": 2, "cp": 4}, {"zero": 2, "schedule": "zero-bubble", "microbatch_size": 1}),
        ({"dp": 2, "cp": 2}, {"zero": 0, "microbatch_size": 1}),
        ({"dp": 2, "cp": 2, "tp": 2}, {"zero": 1}),
        ({"cp": 2, "tp": 2}, {"activation_checkpoint": "full"}),
        ({"pp": 2, "cp": 2}, {"schedule": "1f1b", "microbatch_size": 1}),
        ({"pp": 2, "dp": 2, "cp": 2}, {"zero": 2, "microbatch_size": 1}),
    ],
)
def test_with_other_axes(mesh: dict[str, int], pins: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, mesh, **pins)
