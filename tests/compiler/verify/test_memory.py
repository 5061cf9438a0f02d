"""A verification that this machine has no memory for is refused at once, with what would fit."""

from pathlib import Path

import pytest
from autopar.compiler.verify import check
from autopar.compiler.verify.memory import refuse_too_large
from autopar.cost_models.errors import AutoparError
from autopar.planner.driver import PlanRequest, make_plan

MIB = 1 << 20


@pytest.fixture(scope="module")
def planned():
    """States of 29 MiB and a step of 72 MiB in float64."""
    gpt = Path(__file__).resolve().parents[3] / "sample_models" / "gpt.py"
    return make_plan(PlanRequest(model=str(gpt), gpus=2, batch_size=16))


@pytest.mark.parametrize(
    ("dtype", "mebibytes", "what", "fix"),
    [
        ("auto", 20, "a step of the unsharded module needs 28", "--shrink with --set"),
        ("auto", 35, "2 CPU ranks need 40", "--shrink"),
        ("auto", 80, "a step of the unsharded module needs about", "--dtype float32 needs half of that; or"),
        ("float32", 41, "a step of the unsharded module needs about", "verify it smaller: --shrink with --set"),
    ],
)
def test_too_large(planned, dtype, mebibytes, what, fix):
    with pytest.raises(AutoparError) as error:
        refuse_too_large(planned.graph, planned.plan, dtype, mebibytes * MIB)
    assert error.value.what.startswith(what)
    assert fix in error.value.fix
    if "float32" not in fix:
        assert "float32" not in error.value.fix


def test_a_shrunk_plan_of_a_large_model_is_not_even_searched(planned, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "machine_bytes", lambda: 20 * MIB)
    with pytest.raises(AutoparError, match="a step of the unsharded module needs 28") as error:
        check.verify(planned.plan, tmp_path, shrink=True)
    assert "--set num_layers=2" in error.value.fix


@pytest.mark.parametrize(("dtype", "mebibytes"), [("auto", 120), ("float32", 64), ("auto", 1 << 20)])
def test_room_enough(planned, dtype, mebibytes):
    refuse_too_large(planned.graph, planned.plan, dtype, mebibytes * MIB)
