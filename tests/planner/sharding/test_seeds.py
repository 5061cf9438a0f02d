"""Random operations that no rule seeds are refused before a search; seeded ones are planned."""

import pytest
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.errors import UnsupportedModel

NET = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)

    def forward(self, x):
        h = self.l(x)
        return (DRAWN).square().mean()


def example_inputs(batch_size=8):
    return (torch.randn(batch_size, 8),)
"""


def plan(tmp_path, drawn):
    (tmp_path / "net.py").write_text(NET.replace("DRAWN", drawn))
    return make_plan(PlanRequest(model=str(tmp_path / "net.py"), gpus=2, mesh={"dp": 2}))


def test_a_draw_without_a_seed_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="aten.multinomial") as error:
        plan(tmp_path, "h[:, :1] * torch.multinomial(h.detach().exp(), 1)")
    assert "in forward: return" in error.value.where


@pytest.mark.parametrize(
    "drawn",
    [
        "F.dropout(h, 0.1)",
        "F.dropout(torch.ones_like(h), 0.1) * h",
        "F.dropout1d(h, 0.1)",
        "h * torch.rand(x.size(0), 1)",
        "h + 0.1 * torch.randn_like(h)",
        "h * torch.empty(x.size(0), 1).bernoulli_(0.9)",
        "h * torch.bernoulli(torch.sigmoid(h.detach()))",
    ],
)
def test_seeded_draws_are_planned(tmp_path, drawn):
    assert plan(tmp_path, drawn).graph.is_random
