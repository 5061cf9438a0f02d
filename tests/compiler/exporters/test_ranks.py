"""Emitted packages on forked CPU ranks against the user's module: values and collectives, in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
from autopar.compiler.exporters.pytorch import Provenance, options_of, render_files
from autopar.compiler.lower import lower
from autopar.compiler.verify import verify
from autopar.planner.capture import capture_model
from autopar.planner.placements import program_of
from autopar.planner.plan_json import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"
SLOW = ("gpt_pp2_dp2_tp2", "llama_dp2_tp2", "resnet_pp2", "mlp_pp2_dp2_tp2", "llama_pp4_dp2_interleaved_mixed")


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name", ["matrix_factorization_dp2_tp2", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_equals_the_module_of_the_user(name: str, tmp_path: Path) -> None:
    plan = read_plan(GOLDEN / name / "plan.json")
    graph = capture_model(plan.model.path, arguments=plan.model.arguments, batch_size=plan.batch_size).graph
    model = lower(program_of(plan, graph), [(stage.first, stage.last) for stage in plan.stages])
    for file, text in render_files(model, options_of(plan), Provenance(version="0", source="", plan="")).items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    report = verify(plan, tmp_path, graph=graph, timeout_seconds=240)
    assert report.ok, "\n".join(report.lines(verbose=True))
