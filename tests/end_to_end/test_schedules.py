"""Every pipeline schedule runs: values and collectives verified on a small model, one stage per rank and several."""

from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.schedules import get_schedule, schedule_names

GPT = Path(__file__).resolve().parents[2] / "sample_models" / "gpt.py"
SMALL = {"num_layers": 6, "width": 32, "num_heads": 2, "context": 16}

pytestmark = pytest.mark.gloo


def check(folder: Path, mesh: dict[str, int], *, schedule: str, microbatch_size: int, **pins):
    request = PlanRequest(
        model=str(GPT),
        arguments=SMALL,
        gpus=prod(mesh.values()),
        batch_size=8,
        mesh=mesh,
        schedule=schedule,
        microbatch_size=microbatch_size,
        **pins,
    )
    made = make_plan(request)
    assert made.plan.schedule == schedule
    emit_package(made.plan, made.graph, folder / "package", force=False)
    report = verify(made.plan, folder / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.worst_relative_error <= 1e-9
    return made.plan


# A new file in schedules/ is tested as it comes.
PIPELINES = [name for name in schedule_names() if get_schedule(name).torch_class]


@pytest.mark.parametrize("name", PIPELINES)
def test_a_schedule_is_exact(tmp_path, name):
    is_single = bool(get_schedule(name).refuse(2, get_schedule(name).stages_per_rank[0], 4))
    plan = check(tmp_path, {"pp": 2}, schedule=name, microbatch_size=8 if is_single else 2)
    assert {stage.rank for stage in plan.stages} == {0, 1}


FULL, SELECTIVE = {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}


@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("zero-bubble", {"zero": 3, **FULL}),
        pytest.param("zero-bubble", {"zero": 3, "stages_per_rank": 2, **SELECTIVE}, marks=pytest.mark.slow),
        pytest.param("zero-bubble-v", {"zero": 3, **SELECTIVE}, marks=pytest.mark.slow),
        pytest.param("zero-bubble-v", {"zero": "h.{0..2}=2,*=3", **FULL}, marks=pytest.mark.slow),
        pytest.param(
            "zero-bubble", {"zero": 1, "activation_checkpoint": "h.{0..1}=full,h.5=selective"}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_split_backward_beside_shards_and_recomputation(tmp_path, name, pins):
    check(tmp_path, {"pp": 2, "dp": 2}, schedule=name, microbatch_size=1, **pins)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_several_stages_on_a_rank_beside_zero(tmp_path, zero):
    plan = check(tmp_path, {"pp": 2, "dp": 2}, schedule="interleaved", stages_per_rank=2, microbatch_size=1, zero=zero)
    assert len(plan.stages) == 4
