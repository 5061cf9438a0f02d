"""Runs the command line in this process and catches what it prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from autopar.cli.main import main
from autopar.planner.plan import Plan
from autopar.planner.plan_json import plan_to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `autopar` with these arguments."""

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        caught = capsys.readouterr()
        return Outcome(code=int(code), out=caught.out, err=caught.err)

    return call


@pytest.fixture
def write_plan(tmp_path: Path) -> Callable[..., Path]:
    """Write a plan under tmp_path."""

    def write(plan: Plan, name: str = "plan.json") -> Path:
        file = tmp_path / name
        file.write_text(plan_to_json(plan))
        return file

    return write
