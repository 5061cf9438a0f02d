"""Ctrl-C ends a command with code 130 and one line, whatever it does, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from autopar.cli.exit_codes import ExitCode
from autopar.compiler.interrupts import interrupts_held

MODEL = """
import sys, time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()

def build(waits: bool = False):
    if waits:
        print("HERE", flush=True)
        time.sleep(60)
    return Net()

def example_inputs(batch_size: int = 8):
    return (torch.randn(batch_size, 8),)
"""
FILES = {"collectives.py", "launch.sh", "plan.json", "sharded_model.py", "train.py"}
# What a child does before it runs the command; each says HERE when the moment has come.
SOLVER = """
import random, pulp
from autopar.planner.search import placements_ilp, stages_ilp, step_model
solve = placements_ilp.run_solver

def long(lp, **options):
    draw = random.Random(1)
    hard = pulp.LpProblem("hard", pulp.LpMinimize)
    columns = [hard.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(60)]
    hard += pulp.lpSum(draw.randint(10, 99) * column for column in columns)
    for _ in range(40):
        hard += pulp.lpSum(draw.randint(-50, 99) * column for column in columns) >= 400 + draw.randint(0, 300)
    print("HERE", file=sys.stderr, flush=True)
    return solve(hard, as_mip=True, time_limit_seconds=60)

for module in (placements_ilp, stages_ilp, step_model):
    module.run_solver = long
"""
RENDERED = """
from pathlib import Path
chmod = Path.chmod

def slow(self, mode):
    chmod(self, mode)
    print("HERE", file=sys.stderr, flush=True)
    time.sleep(60)

Path.chmod = slow
"""
REPLACED = """
import os
replace = os.replace

def slow(source, target):
    print("HERE", file=sys.stderr, flush=True)
    time.sleep(0.3)
    replace(source, target)

os.replace = slow
"""
START = "import sys, time\n{patch}\nfrom autopar.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "scratch").mkdir()
    return tmp_path


def interrupted(
    folder: Path, *arguments: str, patch: str = "", after_seconds: float | None = None
) -> tuple[int, str, str]:
    """Run a command as a terminal does, press Ctrl-C once it says HERE or after some seconds; code, stdout, stderr."""
    mark = f"{folder.name}-{time.monotonic_ns()}"
    child = subprocess.Popen(
        [sys.executable, "-c", START.format(patch=patch), *arguments, "--quiet"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "scratch"), "AUTOPAR_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stderr is not None
    said = ""
    if after_seconds is not None:
        time.sleep(after_seconds)
    else:
        while "HERE" not in said:
            line = child.stderr.readline()  # what a model prints goes there too
            assert line, f"ended before the moment: {said}{child.communicate()}"
            said += line
    os.killpg(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=60)
    until = time.monotonic() + 10
    while (left := processes(mark)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"processes {left} are still there"
    # torch makes a folder for its own cache, and leaves it.
    assert not [path for path in (folder / "scratch").iterdir() if not path.name.startswith("torchinductor")]
    return child.returncode, out, err


def processes(mark: str) -> list[int]:
    """Processes that were started with this mark in their environment, but those that have ended."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def listing(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"__pycache__"}


def is_clean(err: str) -> bool:
    return [line for line in err.splitlines() if line != "HERE"] == ["interrupted"]


@pytest.mark.parametrize(
    ("arguments", "patch"),
    [(("--set", "waits=true"), ""), (("--exact",), SOLVER), ((), RENDERED)],
    ids=["in the model file", "in the solver", "before the package is there"],
)
def test_ctrl_c_while_planning(folder: Path, arguments: tuple[str, ...], patch: str) -> None:
    before = listing(folder)
    code, out, err = interrupted(folder, "plan", "net.py", "--gpus", "2", *arguments, patch=patch)
    assert code == ExitCode.INTERRUPTED, err
    assert out == ""
    assert is_clean(err), err
    assert listing(folder) == before


def test_ctrl_c_while_the_package_is_moved_leaves_all_of_it(folder: Path) -> None:
    code, _, err = interrupted(folder, "plan", "net.py", "--gpus", "2", "--mesh", "tp=2", patch=REPLACED)
    assert code == ExitCode.INTERRUPTED
    assert is_clean(err), err
    assert listing(folder / "net-autopar") >= FILES
    assert not [name for name in listing(folder / "net-autopar") if name.startswith(".autopar-")]


def test_an_interrupt_that_is_held_comes_afterwards() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with interrupts_held():
                signal.raise_signal(signal.SIGINT)
                done = True
        finally:
            signal.signal(signal.SIGINT, before)
    assert done


@pytest.mark.slow
@pytest.mark.parametrize("after_seconds", [0.6, 1.2, 2.0, 3.0, 4.5])
def test_ctrl_c_at_any_time(folder: Path, after_seconds: float) -> None:
    """Whatever it does then: imports, captures, searches, writes."""
    code, out, err = interrupted(folder, "plan", "net.py", "--gpus", "2", "--mesh", "tp=2", after_seconds=after_seconds)
    if code == ExitCode.DONE:
        assert "Next: " in out
    else:
        assert code == ExitCode.INTERRUPTED
        assert is_clean(err), err
    if (folder / "net-autopar").exists():
        assert listing(folder / "net-autopar") >= FILES


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("after_seconds", [2.0, 4.0, 6.0, 8.0, 11.0, 15.0])
def test_ctrl_c_while_verifying(folder: Path, after_seconds: float) -> None:
    """Imports, the fork server's start, the reference step, the ranks: all processes end."""
    plan = [sys.executable, "-m", "autopar.cli.main", "plan", "net.py", "--gpus", "4", "--mesh", "dp=2,tp=2", "-q"]
    subprocess.run(plan, cwd=folder, check=True, capture_output=True)
    code, out, err = interrupted(folder, "verify", "net-autopar", after_seconds=after_seconds)
    if code == ExitCode.DONE:
        assert out
    else:
        assert code == ExitCode.INTERRUPTED
        assert is_clean(err), err
    assert listing(folder / "net-autopar") >= FILES
