"""When dp ranks may take different numbers of microbatches, and what is said when they may not."""

from dataclasses import replace

import pytest
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.placements import program_of
from autopar.planner.sharding.mesh import Mesh, described_shares
from autopar.planner.sharding.shares import why_even, why_even_under

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.fc = nn.Linear(16, 16)

    def forward(self, ids):
        x = self.fc(self.embedding(ids))
        EXTRA
        return x.square().mean()

def build():
    return Net()

def example_inputs(batch_size):
    return (torch.randint(0, 8, (batch_size, 4)),)
"""


def reason(folder, extra, **mesh):
    """Why the plan of a model with one more line has even shares."""
    path = folder / "net.py"
    path.write_text(MODEL.replace("EXTRA", extra))
    sizes = {"dp": 2, "pp": 1, "tp": 1, **mesh}
    made = make_plan(PlanRequest(model=str(path), gpus=2, batch_size=8, mesh=sizes, microbatch_size=1, zero=0))
    return why_even(program_of(made.plan, made.graph))


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ("pass", ""),
        ("x = x * (ids != 0).sum().clamp(min=1)", ""),  # over the whole batch, once a step
        ("x = x.flatten(0, 1) * (ids != 0).flatten()[:, None]", ""),
        ("x = x * (ids != 0).float().mean()", "samples a dp rank has"),
        ("x = x + self.embedding(torch.zeros(ids.shape[0], 1, dtype=torch.long))", "changes its placement over dp"),
    ],
)
def test_what_a_model_allows(extra, why, tmp_path):
    found = reason(tmp_path, extra)
    assert why in found
    assert bool(why) == bool(found)


def test_samples_that_are_exchanged_once_a_step_are_not_shared_out(tmp_path):
    """What the inputs give is worked out in parts on tp and put together: as many bytes as a rank has samples."""
    path = tmp_path / "net.py"
    path.write_text(MODEL.replace("EXTRA", "x = x * (ids != 0)[..., None]"))
    mesh = {"dp": 2, "tp": 2, "pp": 1}
    made = make_plan(PlanRequest(model=str(path), gpus=4, batch_size=8, mesh=mesh, microbatch_size=1, zero=0))
    assert why_even(program_of(made.plan, made.graph)) == ""
    prelude = made.graph.templates[0].name
    nodes = {name: {**labels, "tp": "d1"} for name, labels in made.plan.placements[prelude].items() if name != "ids"}
    placements = {**made.plan.placements, prelude: {**made.plan.placements[prelude], **nodes}}
    found = why_even(program_of(replace(made.plan, placements=placements), made.graph))
    assert "is exchanged sample by sample over another axis" in found


def test_without_dp_there_is_nothing_to_share(tmp_path):
    assert reason(tmp_path, "pass", dp=1, tp=2) == "there is one dp rank"


def test_what_policies_allow():
    assert not why_even_under(2, 1)
    assert not why_even_under(1, 4)
    assert "ZeRO-3 gathers" in why_even_under(3, 1)
    assert "ZeRO-2 gathers" in why_even_under(2, 2)


@pytest.mark.parametrize(
    ("shares", "message"),
    [((3, 1, 2), "there are 3 for dp=2"), ((3, 2), "do not deal out 4"), ((4, 0), "at least one"), ((2, 2), "equal")],
)
def test_shares_that_no_mesh_has(shares, message):
    with pytest.raises(ValueError, match=message):
        Mesh(dp=2, microbatches=2, shares=shares)


def test_shares_of_a_mesh():
    assert [Mesh(dp=2, microbatches=2, shares=(3, 1)).share(rank) for rank in range(2)] == [3, 1]
    assert Mesh(dp=2, microbatches=2).share(1) == 2
    assert described_shares((6, 6, 2)) == "6 (x2) and 2"
    assert described_shares((4, 3, 1)) == "4, 3 and 1"
    assert described_shares(()) == ""
