"""Models of LSTM and GRU: samples are split, and dropout between their layers draws from seeds as every other."""

from dataclasses import replace

import pytest
import torch
from autopar.compiler.package import after_edits, emit_package
from autopar.compiler.verify import verify
from autopar.compiler.verify.ranks import run_ranks
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.errors import AutoparError

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True, dropout=0.5)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(self.lstm(x)[0])


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.gru = nn.GRU(width, width, num_layers=2, dropout=0.5)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.gru(x.transpose(0, 1))[0].square().mean()


def build():
    return Net()


def example_inputs(batch_size=8):
    return (torch.randint(16, (batch_size, 6)),)
"""

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def planned(model, mesh, **pins):
    mesh = {"pp": 1, "dp": 1, "tp": 1, **mesh}
    gpus = mesh["pp"] * mesh["dp"] * mesh["tp"]
    return make_plan(PlanRequest(model=model, gpus=gpus, mesh=mesh, batch_size=8, **pins))


@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 2}, {"zero": 3, "activation_checkpoint": "full"}),
        ({"dp": 2, "pp": 2}, {"microbatch_size": 1, "schedule": "zero-bubble", "activation_checkpoint": "full"}),
        ({"tp": 2}, {}),
    ],
    ids=str,
)
def test_recurrent_layers(model, tmp_path, mesh, pins):
    made = planned(model, mesh, **pins)
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph)
    assert report.ok, "\n".join(report.lines(verbose=True))


def test_samples_are_split_over_dp(model):
    plan = planned(model, {"dp": 2}).plan
    assert plan.placements["Block"]["lstm.lstm"]["dp"] == "b"
    assert plan.placements["Gru"]["gru"]["dp"] == "b"


def gradients(packages, store):
    """Of one step with the same weights and seeds, by package."""
    import importlib.util

    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    import sys

    found = []
    for package in packages:
        sys.path.insert(0, package)
        sys.modules.pop("collectives", None)
        spec = importlib.util.spec_from_file_location("sharded_model", f"{package}/sharded_model.py")
        emitted = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(emitted)
        sys.path.remove(package)
        mesh = emitted.build_mesh("cpu")
        stage = emitted.build_stage(mesh, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        ids = torch.randint(16, (8, 6), generator=generator)
        for step in (0, 1):
            torch.rand(1)  # what others draw makes no difference
            stage.zero_grad()
            emitted.train_step(stage, mesh, {"ids": ids}, step)
            found.append({name: p.grad.tolist() for name, p in stage.named_parameters()})
    dist.destroy_process_group()
    return found


def test_recomputation_draws_what_was_drawn(model, tmp_path):
    for policy in ("none", "full"):
        made = planned(model, {}, activation_checkpoint=policy)
        emit_package(made.plan, made.graph, tmp_path / policy, force=False)
    packages = [str(tmp_path / "none"), str(tmp_path / "full")]
    ranks, failure = run_ranks(gradients, [(packages, str(tmp_path / "store"))], timeout_seconds=120)
    assert failure is None, failure.traceback
    kept, kept_later, again, again_later = ranks[0]
    for name in kept:
        assert kept[name] == again[name], name
        assert kept_later[name] == again_later[name], name
    assert kept != kept_later


def test_selective_checkpointing_is_refused_where_products_are_written_over(model):
    with pytest.raises(AutoparError, match=r"aten.lstm.input in blocks.\* writes over its own products") as refused:
        planned(model, {"dp": 2}, activation_checkpoint="selective")
    assert refused.value.fix == "choose one of none, full"
    made = planned(model, {"dp": 2})
    with pytest.raises(AutoparError, match="writes over its own products"):
        after_edits(replace(made.plan, activation_checkpoint="selective"), made.graph)
