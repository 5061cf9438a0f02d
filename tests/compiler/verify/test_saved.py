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

FAST = (
    ("gpt", {"num_layers": 2}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("mlp", {"num_hidden": 3}, {"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}),
)
SLOW = (
    ("gpt", {"num_layers": 2}, {"dp": 2, "tp": 2, "pp": 1}, {"zero": 3}),
    ("gpt", {"num_layers": 2, "dropout": 0.1}, {"dp": 2, "tp": 1, "pp": 1}, {}),
    ("llama", {"num_layers": 2}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("llama", {"num_layers": 2}, {"dp": 2, "tp": 1, "pp": 1}, FULL),
    ("llama", {"num_layers": 2}, {"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}),
    ("resnet", {}, {"dp": 1, "tp": 2, "pp": 1}, {}),
    ("resnet", {}, {"dp": 2, "tp": 1, "pp": 1}, FULL),
    ("matrix_factorization", {}, {"dp": 2, "tp": 2, "pp": 1}, {}),
    ("logistic_regression", {}, {"dp": 2, "tp": 1, "pp": 1}, {"zero": 3}),
)
BATCH_SIZES = {"gpt": 8, "llama": 8, "mlp": 32, "resnet": 4, "matrix_factorization": 32, "logistic_regression": 32}


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
