"""Expert parallelism: experts of the mixture split over ranks, tokens exchanged; values and collectives verified."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import after_edits, emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

MOE = Path(__file__).resolve().parents[2] / "sample_models" / "moe.py"
SMALL = {"num_layers": 2, "context": 16}

pytestmark = pytest.mark.gloo


def planned(mesh: dict[str, int], **pins):
    gpus = prod(mesh.values())
    return make_plan(PlanRequest(model=str(MOE), arguments=SMALL, gpus=gpus, batch_size=8, mesh=mesh, **pins))


def check(tmp_path: Path, mesh: dict[str, int], **pins) -> None:
    made = planned(mesh, **pins)
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9


def test_experts_are_split_and_tokens_exchanged(tmp_path: Path) -> None:
    made = planned({"ep": 2})
    plan = made.plan
    assert plan.mesh == {"pp": 1, "dp": 1, "ep": 2, "tp": 1}
    experts = {pattern: pairs for pattern, pairs in plan.tensors.items() if ".experts." in pattern}
    assert set(map(str, experts.values())) == {"{'ep': 'S(0)'}"}
    assert {str(pairs) for pattern, pairs in plan.tensors.items() if pattern not in experts} == {"{'ep': 'R/P'}"}
    exchanges = [line for line in plan.collectives if line.op == "all_to_all"]
    assert {line.reason: line.count for line in exchanges} == {"forward": 4, "backward": 4}  # to the experts and back
    emit_package(plan, made.graph, tmp_path / "package", force=False)
    report = verify(plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9


def test_collectives_after_what_is_saved_are_not_recomputed(tmp_path: Path) -> None:
    """The balance is summed over ranks after the last product that the backward needs: in the code as in the count."""
    made = planned({"ep": 2}, activation_checkpoint="full")
    edit = {"moe.matmul_3": {"ep": "k"}, "moe.mean_1": {"ep": "partial"}, "moe.mul_5": {"ep": "partial:1"}}
    placements = {**made.plan.placements, "Block1": {**made.plan.placements["Block1"], **edit}}
    plan = after_edits(replace(made.plan, placements=placements), made.graph)
    emit_package(plan, made.graph, tmp_path / "package", force=False)
    report = verify(plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"ep": 4}, {}),
        ({"dp": 2, "ep": 2}, {"zero": 3}),
        ({"dp": 2, "ep": 2}, {"zero": 1, "microbatch_size": 2}),
        ({"dp": 2, "ep": 2, "tp": 2}, {"zero": 1}),
        ({"dp": 2, "ep": 2, "tp": 2}, {"zero": 3, "microbatch_size": 2}),
        ({"ep": 2, "tp": 2}, {"activation_checkpoint": "full"}),
        ({"ep": 2, "cp": 2}, {}),
        ({"dp": 2, "ep": 2, "cp": 2}, {"zero": 3}),
        ({"dp": 2, "ep": 2, "cp": 2}, {"zero": 1}),
        ({"ep": 2, "cp": 2}, {"zero": 1}),
        ({"ep": 2, "cp": 2, "tp": 2}, {"zero": 1}),
        ({"pp": 2, "ep": 2}, {"schedule": "1f1b", "microbatch_size": 2}),
    ],
)
def test_with_other_axes(mesh: dict[str, int], pins: dict[str, object], tmp_path: Path) -> None:
    check(tmp_path, mesh, **pins)
