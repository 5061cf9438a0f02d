"""Uneven shares of the batch: values and collectives of what is emitted, and what is refused."""

from math import prod
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.errors import AutoparError

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"
IGNORED = """
import torch
from torch import nn

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(16, 32)

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

def build():
    return Tagger()

def example_inputs(batch_size):
    ids = torch.randint(0, 32, (batch_size, 6))
    # Most labels of the first samples are ignored, none of the last: no two shares count alike.
    ignored = torch.arange(6) >= 6 * torch.linspace(0.2, 1, batch_size)[:, None]
    return ids, torch.where(ignored, -100, ids.roll(-1, 1))
"""


def shared(model, mesh, shares, *, batch_size, **pins):
    """A plan whose dp ranks take so many microbatches of one sample."""
    gpus = prod(mesh.values())
    pins = {"microbatch_size": 1, "batch_shares": shares, **pins}
    made = make_plan(PlanRequest(model=str(model), gpus=gpus, batch_size=batch_size, mesh=mesh, **pins))
    assert made.plan.batch_shares == shares
    return made


def check(folder, made):
    emit_package(made.plan, made.graph, folder / "package", force=False)
    report = verify(made.plan, folder / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.dtype == "float64"
    assert report.worst_relative_error <= 1e-9
    return (folder / "package" / "sharded_model.py").read_text()


@pytest.fixture
def tagger(tmp_path):
    path = tmp_path / "tagger.py"
    path.write_text(IGNORED)
    return path


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "shares", "pins"),
    [
        ({"dp": 2, "pp": 2, "tp": 1}, (6, 2), {"schedule": "1f1b", "zero": 2}),
        ({"dp": 4, "pp": 1, "tp": 1}, (3, 1, 2, 2), {"zero": 0}),
        pytest.param({"dp": 4, "pp": 1, "tp": 1}, (5, 1, 1, 1), {"zero": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "pp": 1, "tp": 1}, (5, 1, 1, 1), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 2, "tp": 1}, (1, 7), {"schedule": "gpipe", "zero": 0}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "pp": 1, "tp": 2}, (1, 7), {"zero": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "pp": 2, "tp": 1}, (6, 2), {"schedule": "interleaved", "stages_per_rank": 2, "zero": 1},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"dp": 2, "pp": 2, "tp": 1}, (2, 6), {"schedule": "zero-bubble", "zero": 2}, marks=pytest.mark.slow
        ),
    ],
)  # fmt: skip
def test_uneven_shares_with_ignored_labels(mesh, shares, pins, tagger, tmp_path):
    text = check(tmp_path, shared(tagger, mesh, shares, batch_size=8, **pins))
    assert f"BATCH_SHARES = {shares}" in text


@pytest.mark.gloo
def test_the_search_shares_the_batch_out_where_a_rank_is_slow(tagger, tmp_path):
    request = PlanRequest(
        model=str(tagger), gpus=2, batch_size=8, mesh={"dp": 2}, microbatch_size=1, cluster="cpu-local",
        slow_ranks={0: 3.0}, zero=2,
    )  # fmt: skip
    made = make_plan(request)
    assert made.plan.batch_shares[0] < made.plan.batch_shares[1]
    assert made.plan.dp_paces == ((3.0,), (1.0,))
    check(tmp_path, made)


@pytest.mark.gloo
def test_uneven_shares_shrink(tagger, tmp_path):
    made = shared(tagger, {"dp": 4, "pp": 1, "tp": 1}, (3, 1, 2, 2), batch_size=8, zero=2)
    report = verify(made.plan, tmp_path, shrink=True, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.batch_shares == (4, 2)


def test_batch_norm_has_one_share():
    with pytest.raises(AutoparError, match="batch-shares=3,1 need microbatches.*needs the whole batch at once"):
        shared(SAMPLES / "resnet.py", {"dp": 2, "pp": 1, "tp": 1}, (3, 1), batch_size=8, arguments={"width": 8})


def test_a_model_that_cuts_its_inputs_evenly_says_so(tmp_path):
    path = tmp_path / "tagger.py"
    line = "x = self.embedding(ids) * (ids != 0).float().mean()"
    path.write_text(IGNORED.replace("x = self.embedding(ids)", line))
    with pytest.raises(AutoparError, match="batch-shares=3,1 cannot be: .* how many samples a dp rank has") as caught:
        shared(path, {"dp": 2, "pp": 1, "tp": 1}, (3, 1), batch_size=8)
    assert "leave batch-shares out" in str(caught.value.fix)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("model", "mesh", "shares", "pins"),
    [
        ("gpt", {"dp": 2, "cp": 2, "pp": 1, "tp": 1}, (6, 2), {"zero": 2}),
        pytest.param("llama", {"dp": 2, "cp": 2, "pp": 1, "tp": 1}, (2, 6), {"zero": 1}, marks=pytest.mark.slow),
        pytest.param(
            "gpt", {"dp": 2, "cp": 2, "pp": 2, "tp": 1}, (6, 2), {"zero": 0, "schedule": "1f1b"}, marks=pytest.mark.slow
        ),
    ],
)
def test_flat_labels_cut_sample_by_sample_over_another_axis(model, mesh, shares, pins, tmp_path):
    """Code cannot say how many samples there are: dp ranks have different numbers."""
    arguments = {"num_layers": 2, "context": 16}
    made = shared(SAMPLES / f"{model}.py", mesh, shares, batch_size=8, arguments=arguments, **pins)
    assert "groups=targets.size(0) // 16)" in check(tmp_path, made)


def test_cp_beside_different_devices_shares_the_batch_out():
    mesh = {"dp": 2, "cp": 2, "pp": 1, "tp": 1}
    arguments = {"num_layers": 2, "context": 16}
    request = PlanRequest(
        model=str(SAMPLES / "gpt.py"), arguments=arguments, gpus=4, batch_size=16, mesh=mesh, microbatch_size=1, zero=0,
        cluster="cpu-local", slow_ranks={1: 3.0},
    )  # fmt: skip
    assert make_plan(request).plan.batch_shares == (4, 12)
