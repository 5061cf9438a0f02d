"""Reported models on the meshes where something else than the report's own trap was found: plan, emit, verify."""

from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

REPORTS = Path(__file__).parent / "reports"


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh", "dtype"),
    [
        ("param_used_directly", {"dp": 2, "tp": 2}, "float64"),  # two gradients in one memory
        ("causal_mask_buffers", {"pp": 2, "tp": 2}, "float64"),  # where; a stage without partial gradients
        ("lstm_gru", {"tp": 2}, "float64"),  # states made by factories
        ("weight_norm", {"pp": 4}, "float64"),  # a stage without parameters
        ("complex_rope", {"dp": 2}, "float32"),  # a complex buffer
        ("vocab_not_divisible", {"dp": 2}, "float32"),  # a cast that is not in the graph
        ("autocast_and_no_grad", {"dp": 2}, "float32"),  # bfloat16 inside
    ],
)
def test_equals_the_module_of_the_user(name, mesh, dtype, tmp_path):
    sizes = {"dp": 1, "tp": 1, "pp": 1, **mesh}
    gpus = sizes["dp"] * sizes["tp"] * sizes["pp"]
    planned = make_plan(PlanRequest(model=str(REPORTS / f"{name}.py"), gpus=gpus, mesh=sizes))
    emit_package(planned.plan, planned.graph, tmp_path / "package", force=False)
    report = verify(planned.plan, tmp_path / "package", graph=planned.graph, timeout_seconds=240)
    assert report.ok, "\n".join(report.lines(verbose=True))
    assert report.dtype == dtype
