"""Stochastic depth and noise as models write them: what is split draws apart, what is not draws alike."""

import re

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

MODEL = """
import torch
from torch import nn


def drop_path(x, p):
    keep = 1 - p
    return x.div(keep) * torch.floor(keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype))


def stochastic_depth(x, p):
    return x * torch.empty((x.shape[0], 1, 1), dtype=x.dtype).bernoulli_(1 - p).div_(1 - p)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear, self.out = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        x = x + drop_path(self.linear(self.norm(x)), 0.2)
        return x + stochastic_depth(self.out(x).relu(), 0.2) + 0.1 * torch.randn_like(x)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def build():
    return Net()


def example_inputs(batch_size=8):
    return (torch.randint(16, (batch_size, 6)),)
"""

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 2}, {"activation_checkpoint": "full"}),
        ({"pp": 2, "tp": 2}, {"microbatch_size": 2, "activation_checkpoint": "selective"}),
    ],
    ids=str,
)
def test_draws(tmp_path, mesh, pins):
    (tmp_path / "net.py").write_text(MODEL)
    mesh = {"pp": 1, "dp": 1, "tp": 1, **mesh}
    gpus = mesh["pp"] * mesh["dp"] * mesh["tp"]
    made = make_plan(PlanRequest(model=str(tmp_path / "net.py"), gpus=gpus, mesh=mesh, batch_size=8, **pins))
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    text = (tmp_path / "package" / "sharded_model.py").read_text()
    assert len(re.findall(r"seeded_draw\(\s*lambda", text)) == 3
    report = verify(made.plan, tmp_path / "package", graph=made.graph)
    assert report.ok, "\n".join(report.lines(verbose=True))
