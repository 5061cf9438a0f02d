from pathlib import Path

from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.what_if import what_if

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()

def example_inputs(batch_size=8):
    return (torch.ones(batch_size, 8),)
"""


def test_searches_again_under_each_change(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(MODEL)
    plan = make_plan(PlanRequest(model=str(file), gpus=2, batch_size=8, cluster_overrides={"hbm_gib": 20})).plan
    memory, link, batch = what_if(plan)
    assert memory.plan is not None
    assert memory.plan.memory_capacity_bytes == 2 * plan.memory_capacity_bytes == 40 * 2**30
    assert link.plan is not None
    assert link.plan.cluster_overrides.keys() == {"hbm_gib", "intra_node_gb_per_second"}
    assert link.plan.step_seconds <= plan.step_seconds
    assert batch.plan is not None
    assert batch.plan.batch_size == 16
    assert "With a batch of 16: " in batch.sentence(plan)
