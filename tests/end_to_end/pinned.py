"""A sample model planned with pins, emitted and verified."""

from __future__ import annotations

from math import prod
from pathlib import Path

from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.planner.driver import PlanRequest, make_plan

SAMPLES = Path(__file__).resolve().parents[2] / "sample_models"


def planned(model, mesh, *, arguments=None, batch_size=4, **pins):
    request = PlanRequest(
        model=str(SAMPLES / f"{model}.py"),
        arguments=arguments or {"num_layers": 4, "context": 16},
        gpus=prod(mesh.values()),
        batch_size=batch_size,
        mesh={"dp": 1, "tp": 1, "pp": 1, **mesh},
        **pins,
    )
    return make_plan(request)


def verified(folder, model, mesh, **given):
    """The plan and the text of its module, equal to the user's in float64."""
    made = planned(model, mesh, **given)
    emit_package(made.plan, made.graph, folder / "package", force=False)
    report = verify(made.plan, folder / "package", graph=made.graph, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.dtype == "float64"
    assert report.worst_relative_error <= 1e-9
    return made.plan, (folder / "package" / "sharded_model.py").read_text()
