"""Blocks that are called several times, or share tensors with others: what they hold, and what each call draws."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

HEAD = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.up(x).relu()), DROPOUT, self.training)

def example_inputs(batch_size=4):
    return (torch.randn(batch_size, 8),)
"""
AGAIN = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 8), Block(), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = self.block(x)
        x = self.block(self.last(x))
        return x.square().mean()

def build():
    return Net()
"""
TIED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(5))
        self.h[4].down.weight = self.h[1].down.weight
        self.h[3].up.bias = self.h[0].up.bias

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x.square().mean()

def build():
    return Net()
"""


def emitted(folder: Path, model: str, dropout: float, **pins):
    file = folder / "net.py"
    file.write_text(HEAD.replace("DROPOUT", str(dropout)) + model)
    planned = make_plan(PlanRequest(model=str(file), **pins))
    emit_package(planned.plan, planned.graph, folder / "package", force=False)
    return planned


def test_every_call_of_a_block_draws_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted(tmp_path, AGAIN, 0.5, gpus=1)
    monkeypatch.syspath_prepend(str(tmp_path / "package"))
    module = importlib.import_module("sharded_model")
    for name in ("sharded_model", "collectives"):  # others have modules of these names too
        sys.modules.pop(name)
    seeds: list[int] = []

    def draw(x: torch.Tensor, p: float, training: bool, seed: int) -> torch.Tensor:
        seeds.append(seed)
        return x

    monkeypatch.setattr(module, "seeded_dropout", draw)
    stage = module.build_stage(None, torch.device("cpu"))
    stage.step, stage.microbatches = 0, [stage.prepare({"x": torch.zeros(4, 8)})]
    stage(0)
    assert len(set(seeds)) == 4


@pytest.mark.gloo
@pytest.mark.parametrize("policy", ["none", "full"])
def test_blocks_with_tensors_of_others(tmp_path: Path, policy: str) -> None:
    planned = emitted(tmp_path, TIED, 0.0, gpus=2, mesh={"dp": 2}, activation_checkpoint=policy)
    report = verify(planned.plan, tmp_path / "package", graph=planned.graph, timeout_seconds=240)
    assert report.ok, "\n".join(report.lines(verbose=True))
