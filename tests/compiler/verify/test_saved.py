"""Bytes of a plan for CPU ranks are the bytes that the ranks of its package keep."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
from autopar.compiler.package import emit_package
from autopar.compiler.verify.saved import SavedRecorder, compare_bytes
from autopar.planner.driver import PlanRequest, make_plan
from torch import nn

SAMPLE_MODELS = Path(__file__).resolve().parents[3] / "sample_models"
FULL = {"activation_checkpoint": "full"}
SPLIT = {"schedule": "zero-bubble", "stages_per_rank": 1, "microbatch_size": 2}

FAST = (
    ("gpt", {"num_layers": 2}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("mlp", {"num_hidden": 3}, {"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}),
    ("gpt", {"num_layers": 2}, {"dp": 1, "tp": 1, "pp": 2}, {**SPLIT, "activation_checkpoint": "selective"}),
)
SLOW = (
    ("gpt", {"num_layers": 2}, {"dp": 2, "tp": 2, "pp": 1}, {"zero": 3}),
    ("gpt", {"num_layers": 2, "dropout": 0.1}, {"dp": 2, "tp": 1, "pp": 1}, {}),
    # Attention that drops is no kernel of its own on a CPU: of its parts only the products are kept.
    ("gpt", {"num_layers": 2, "dropout": 0.1}, {"dp": 2, "tp": 1, "pp": 1}, {"activation_checkpoint": "selective"}),
    ("llama", {"num_layers": 2}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("llama", {"num_layers": 2}, {"dp": 2, "tp": 1, "pp": 1}, FULL),
    ("llama", {"num_layers": 2}, {"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}),
    ("llama", {"num_layers": 4}, {"dp": 2, "tp": 1, "pp": 2}, {**SPLIT, **FULL, "zero": 3}),
    ("moe", {"num_layers": 2}, {"dp": 2, "tp": 1, "pp": 1}, FULL),
    ("resnet", {}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("resnet", {}, {"dp": 2, "tp": 1, "pp": 1}, FULL),
    ("matrix_factorization", {}, {"dp": 2, "tp": 2, "pp": 1}, {}),
    ("logistic_regression", {}, {"dp": 2, "tp": 1, "pp": 1}, {"zero": 3}),
)
BATCH_SIZES = {
    "gpt": 8,
    "llama": 8,
    "moe": 8,
    "mlp": 32,
    "resnet": 4,
    "matrix_factorization": 32,
    "logistic_regression": 32,
}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("model", "arguments", "mesh", "pins"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_predicted_bytes_are_what_ranks_keep(model, arguments, mesh, pins, tmp_path):
    request = PlanRequest(
        model=str(SAMPLE_MODELS / f"{model}.py"),
        arguments=arguments,
        gpus=prod(mesh.values()),
        batch_size=BATCH_SIZES[model],
        cluster="cpu-local",
        mesh=mesh,
        **pins,
    )
    planned = make_plan(request)
    emit_package(planned.plan, planned.graph, tmp_path / "package", force=False)
    stages = compare_bytes(planned.plan, tmp_path / "package", planned.graph)
    assert len(stages) == mesh["pp"]
    for stage in stages:
        assert stage.predicted == stage.counted
        assert stage.counted["activations"] > 0


# Blocks that are handed what has no gradient: made by the forward, by the block before, and by the prelude.
GATED = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x, gate, mask, scale):
        y = self.up(x * mask) * gate
        return x + y.tanh(), (y > 0).to(x.dtype), scale * 2


class Gated(nn.Module):
    def __init__(self, width: int = 8, num_layers: int = 3):
        super().__init__()
        self.inlet = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))

    def forward(self, features, keep):
        x = self.inlet(features)
        mask = (keep > 0).to(features.dtype).unsqueeze(-1)
        gate, scale = torch.ones_like(x), x.new_ones(x.size(0))
        for block in self.blocks:
            x, gate, scale = block(x, gate, mask, scale)
        return (x * scale.unsqueeze(-1)).square().mean()


def build():
    return Gated()


def example_inputs(batch_size: int = 8):
    return torch.randn(batch_size, 8), torch.randn(batch_size)
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 1, "tp": 1, "pp": 1}, FULL),
        pytest.param({"dp": 1, "tp": 1, "pp": 1}, {}, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "tp": 2, "pp": 1}, FULL, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "tp": 1, "pp": 1}, {**FULL, "microbatch_size": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "tp": 1, "pp": 2}, {**FULL, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param({"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
)
def test_what_blocks_are_handed_without_gradient_is_counted(mesh, pins, tmp_path):
    (tmp_path / "gated.py").write_text(GATED)
    request = PlanRequest(
        model=str(tmp_path / "gated.py"), gpus=prod(mesh.values()), batch_size=8, cluster="cpu-local", mesh=mesh, **pins
    )
    planned = make_plan(request)
    emit_package(planned.plan, planned.graph, tmp_path / "package", force=False)
    for stage in compare_bytes(planned.plan, tmp_path / "package", planned.graph):
        assert stage.predicted == stage.counted


class _Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.microbatches = [{"x": torch.randn(8, 4)}]

    def forward(self, microbatch):
        hidden = (self.microbatches[microbatch]["x"] @ self.weight).relu()
        return (hidden.view(4, 8) * hidden.view(4, 8)).sum()


def test_the_recorder_counts_storages_once_without_parameters_and_inputs():
    stage = _Stage()
    recorder = SavedRecorder(stage)
    stage(0).backward()
    # The result of relu, kept by relu and twice, as a view, by the product.
    assert recorder.num_bytes == [8 * 4 * 4]
    assert [size for _, size in recorder.largest] == [8 * 4 * 4]
