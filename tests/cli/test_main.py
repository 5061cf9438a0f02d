"""The app as a whole: help, exit codes, streams, and what starts without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from autopar.cli import app as cli_app
from autopar.cli.exit_codes import ExitCode
from autopar.cli.main import main
from autopar.cost_models.errors import HardwareError
from autopar.planner.errors import AutoparError, CheckFailed, InfeasibleError, UnsupportedModel
from autopar.planner.plan import Plan

COMMANDS = ["plan", "emit", "verify", "diff", "graph", "explain", "hardware", "ops"]


def test_version(run: Callable[..., Any]) -> None:
    assert run("--version").out == f"autopar {version('autopar')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_starts_with_an_example(run: Callable[..., Any], command: str) -> None:
    found = run(command, "--help")
    assert found.code == ExitCode.DONE
    assert f"Usage: autopar {command}" in found.out
    if command != "hardware":
        assert f"\n  autopar {command} " in found.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["frob"],
        ["diff"],
        ["diff", "a.json"],
        ["plan", "gpt.py", "--gpus", "many"],
        ["plan", "gpt.py", "--gpus", "0"],
        ["plan", "gpt.py", "--gpus", "8", "--zero", "4"],
        ["plan", "gpt.py", "--gpus", "8", "--precision", "fp8"],
        ["plan", "gpt.py", "--gpus", "8", "--no-such-option"],
        ["plan"],
        ["plan", "gpt.py"],
        ["plan", "gpt.py", "--gpus", "8", "--mesh", "xp=2"],
        ["plan", "gpt.py", "--gpus", "8", "--set", "preset"],
        ["hardware", "show", "no-such-gpu"],
        ["emit", "none.json"],
        ["verify", "none.json"],
        ["explain", "none.json"],
        ["plan", "--check", "none.json"],
        ["plan", "gpt.py", "--check", "none.json"],
        ["plan", "--check", "none.json", "--zero", "2"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_code_2(run: Callable[..., Any], arguments: list[str]) -> None:
    found = run(*arguments)
    assert found.code == ExitCode.USAGE
    assert found.out == ""
    assert found.err.count("rror: ") == 1
    assert "Traceback" not in found.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AutoparError, ExitCode.USAGE),
        (HardwareError, ExitCode.USAGE),
        (InfeasibleError, ExitCode.INFEASIBLE),
        (UnsupportedModel, ExitCode.UNSUPPORTED),
        (CheckFailed, ExitCode.CHECK_FAILED),
    ],
)
def test_errors_become_codes(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: type[AutoparError], code: ExitCode
) -> None:
    def fail(**_: object) -> None:
        raise error("what", where="there", fix="do this")

    monkeypatch.setattr(cli_app, "app", fail)
    found = run("plan")
    assert (found.code, found.out) == (code, "")
    assert found.err == "error: what\n  where: there\n  fix: do this\n"


def test_our_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli_app, "app", fail)
    with pytest.raises(ZeroDivisionError):
        main(["plan"])


TORCH_FREE = [
    ["--help"],
    ["plan", "--help"],
    ["diff", "PLAN", "PLAN"],
    ["diff", "PLAN", "PLAN", "--format", "markdown"],
    ["explain", "PLAN"],
    ["hardware", "list"],
    ["hardware", "show", "h100-sxm"],
]

PROBE = """
import sys
from autopar.cli.main import main
code = main(sys.argv[1:])
assert code == 0, code
heavy = {"torch", "pulp", "highspy", "numpy"} & set(sys.modules)
sys.exit(f"imported {sorted(heavy)}" if heavy else 0)
"""


@pytest.mark.parametrize("arguments", TORCH_FREE, ids=" ".join)
def test_starts_without_torch(example_plan: Plan, write_plan: Callable[..., Path], arguments: list[str]) -> None:
    file = str(write_plan(example_plan))
    command = [sys.executable, "-c", PROBE, *(file if a == "PLAN" else a for a in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_stdout_is_only_the_result(run: Callable[..., Any]) -> None:
    data = json.loads(run("hardware", "list", "--json").out)
    assert data["schema_version"] == 1
    assert {c["name"] for c in data["clusters"]} >= {"h100-sxm", "a100-80g-sxm", "cpu-local"}


LOST = [
    ["--help"],
    ["--version"],
    ["plan", "--help"],
    ["explain", "PLAN"],
    ["explain", "PLAN", "--json"],
    ["diff", "PLAN", "PLAN"],
    ["hardware", "list"],
    ["hardware", "show", "h100-sxm", "--json"],
]


def run_program(arguments: list[str], stdout: int) -> subprocess.CompletedProcess[str]:
    code = "import sys; from autopar.cli.main import program; sys.exit(program())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )


@pytest.mark.parametrize("arguments", LOST, ids=" ".join)
def test_a_full_disk_is_an_answer(example_plan: Plan, write_plan: Callable[..., Path], arguments: list[str]) -> None:
    file = str(write_plan(example_plan))
    with open("/dev/full", "w") as full:
        done = run_program([file if a == "PLAN" else a for a in arguments], full.fileno())
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("error: cannot write the result: No space left on device\n  where: standard output\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", LOST, ids=" ".join)
def test_a_reader_that_has_ended_is_told_nothing(
    example_plan: Plan, write_plan: Callable[..., Path], arguments: list[str]
) -> None:
    file = str(write_plan(example_plan))
    heard, speaking = os.pipe()
    os.close(heard)
    try:
        done = run_program([file if a == "PLAN" else a for a in arguments], speaking)
    finally:
        os.close(speaking)
    assert (done.returncode, done.stderr) == (ExitCode.UNREAD, "")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full"])
def test_streams_that_are_closed_lose_what_is_written_to_them(closed: str) -> None:
    code = "import sys; from autopar.cli.main import program; sys.exit(program())"
    command = f"'{sys.executable}' -c '{code}' hardware show h100-sxm {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.returncode == ExitCode.DONE
    assert done.stderr == ""
    assert bool(done.stdout) == (not closed.startswith(">&-"))
