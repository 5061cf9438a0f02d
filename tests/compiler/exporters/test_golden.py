"""The emitted text of some plans against golden files, and what every emitted file must be."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from autopar.compiler.exporters.pytorch import Provenance, options_of, render_files
from autopar.compiler.lower import lower
from autopar.planner.capture import capture_model
from autopar.planner.capture.graph import ModelGraph
from autopar.planner.placements import program_of
from autopar.planner.plan import Plan
from autopar.planner.plan_json import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


@cache
def _case(name: str) -> tuple[Plan, ModelGraph]:
    plan = read_plan(GOLDEN / name / "plan.json")
    captured = capture_model(plan.model.path, arguments=plan.model.arguments, batch_size=plan.batch_size)
    return plan, captured.graph


def _render(name: str) -> dict[str, str]:
    plan, graph = _case(name)
    model = lower(program_of(plan, graph), [(stage.first, stage.last) for stage in plan.stages])
    return render_files(model, options_of(plan), Provenance(version="0", source="model.py:build", plan="golden"))


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, update_golden: bool) -> None:
    files = _render(name)
    for file, text in files.items():
        golden = GOLDEN / name / f"{file}.golden"
        if update_golden:
            golden.write_text(text, encoding="utf-8")
        assert text == golden.read_text(encoding="utf-8"), f"{golden} differs; --update-golden accepts it"


@pytest.mark.parametrize("name", CASES)
def test_emitting_twice_is_equal(name: str) -> None:
    assert _render(name) == _render(name)


@pytest.mark.parametrize("name", CASES)
def test_files_are_tidy(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    files = _render(name)
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 120
    options = ["--isolated", "--no-cache", "--line-length", "120"]
    for command in (["format", "--check", "--diff"], ["check", "--select", "E,F,I,UP,B"]):
        result = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("name", CASES)
def test_imports_only_torch_and_its_own_folder(name: str) -> None:
    files = _render(name)
    own = {Path(file).stem for file in files}
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.partition(".")[0]
                assert top == "torch" or top in own or top in sys.stdlib_module_names


@pytest.mark.parametrize("name", CASES)
def test_holds_every_parameter_of_the_model(name: str) -> None:
    plan, graph = _case(name)
    model = lower(program_of(plan, graph), [(stage.first, stage.last) for stage in plan.stages])
    held = {tensor.fqn for stage in model.stages for tensor in stage.tensors}
    assert held == set(graph.tensors)
