"""Parameters of other dtypes than float32, empty ones, and losses of other shapes than (): verified as they are."""

from dataclasses import replace
from math import prod

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.errors import AutoparError

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8).double()
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.none = nn.Parameter(torch.empty(0, 8))
        self.narrow = nn.Linear(8, 8).bfloat16()

    def forward(self, x):
        x = self.wide(self.plain(x).double()).float() + self.none.sum()
        x = (x.to(torch.complex64) @ self.turn).abs()
        return self.narrow(x.bfloat16()).float().square().mean().reshape(1)


def build():
    torch.manual_seed(0)
    return Net()


def example_inputs(batch_size: int = 8):
    return (torch.randn(batch_size, 8),)
"""


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        ({"dp": 2, "tp": 2}, {"zero": 0}),
        pytest.param({"dp": 4}, {"zero": 1}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp": 2}, {"zero": 0, "schedule": "1f1b"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_tensor_keeps_its_dtype(tmp_path, mesh, pins):
    model = tmp_path / "net.py"
    model.write_text(NET)
    made = make_plan(PlanRequest(model=str(model), gpus=prod(mesh.values()), mesh=mesh, **pins))
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.dtype == "float32"


def test_fsdp_is_not_offered_for_blocks_of_several_dtypes(tmp_path):
    model = tmp_path / "net.py"
    model.write_text(NET)
    request = PlanRequest(model=str(model), gpus=4, mesh={"dp": 4})
    assert make_plan(request).plan.zero <= 1
    with pytest.raises(AutoparError, match=r"zero=3 is FSDP2's, .* bfloat16 and complex64 and float32 and float64 are"):
        make_plan(replace(request, zero=3))


@pytest.mark.gloo
def test_a_model_that_is_one_block_is_gathered_as_what_lies_outside_of_blocks(tmp_path):
    model = tmp_path / "net.py"
    model.write_text(
        "import torch\nfrom torch import nn\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.w = nn.Parameter(torch.randn(8, 8))\n    def forward(self, x):\n"
        "        return (x @ self.w).square().mean()\n"
        "def example_inputs(batch_size=8):\n    return (torch.randn(batch_size, 8),)\n"
    )
    made = make_plan(PlanRequest(model=str(model), gpus=2, mesh={"dp": 2}, zero=3))
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())


LARGE = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 1))


def loss(output, x):
    return output.square().mean()


def example_inputs(batch_size: int = 4):
    return (torch.randn(batch_size, 2048),)
"""


@pytest.mark.gloo
def test_a_norm_of_many_numbers_is_as_exact_as_that_of_one_process(tmp_path):
    """The norm of 4 million float32 numbers is 1e-4 off on a CPU, that of a half less."""
    model = tmp_path / "large.py"
    model.write_text(LARGE)
    made = make_plan(PlanRequest(model=str(model), gpus=2, mesh={"dp": 2}, zero=2))
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    report = verify(made.plan, tmp_path / "package", graph=made.graph, dtype="float32", timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
