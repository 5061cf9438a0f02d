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


def check(
    folder: Path, mesh: dict[str, int], *, schedule: str, microbatch_size: int, model=GPT, arguments=SMALL, **pins
):
    request = PlanRequest(
        model=str(model),
        arguments=arguments,
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


MIXER = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.channels = nn.Linear(6, 6), nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.channels(self.tokens(x.transpose(1, 2)).transpose(1, 2)))

class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
    def forward(self, x):
        return self.blocks(x).square().mean()

def build():
    return Mixer()

def example_inputs(batch_size=8):
    return (torch.randn(batch_size, 6, 8),)
"""


def test_gradients_of_a_split_backward_are_sent_however_they_lie(tmp_path):
    """A stage that begins with a transpose makes a transposed gradient."""
    model = tmp_path / "mixer.py"
    model.write_text(MIXER)
    check(tmp_path, {"pp": 2}, schedule="zero-bubble", microbatch_size=2, model=model, arguments={})


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
