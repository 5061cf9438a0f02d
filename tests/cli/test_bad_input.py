"""Bad input to `plan`: one clear message, the right exit code, and nothing half-written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from autopar.cli.exit_codes import ExitCode

Run = Callable[..., Any]

HEAD = """
import torch
from torch import nn
"""
TWO_MODELS = f"""{HEAD}
class First(nn.Linear):
    def __init__(self): super().__init__(4, 4)

class Second(nn.Linear):
    def __init__(self): super().__init__(4, 4)
"""
MODEL = f"""{HEAD}
class Net(nn.Module):
    def __init__(self, width: int = 12, vocabulary: int = 40):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        return self.head(self.embedding(ids)).logsumexp(-1).mean()

def build(width: int = 12, vocabulary: int = 40):
    return Net(width, vocabulary)

def example_inputs(batch_size: int = 8):
    return (torch.randint(40, (batch_size, 6)),)
"""
SMALL = f"""{HEAD}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = LINEAR

    def forward(self, x):
        y = self.l(x)
        return LOSS

def example_inputs(batch_size: int = 8):
    return (torch.randn(batch_size, 4),)
"""


def small(loss: str = "y.square().mean()", linear: str = "nn.Linear(4, 8)") -> str:
    return SMALL.replace("LINEAR", linear).replace("LOSS", loss)


NO_INPUTS = MODEL.split("def example_inputs")[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "no_inputs.py").write_text(NO_INPUTS)
    (tmp_path / "two.py").write_text(TWO_MODELS)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "raises.py").write_text("def build():\n    return 1 / 0\n")
    (tmp_path / "needs.py").write_text("import no_such_module_at_all\n")
    (tmp_path / "lazy.py").write_text(small(linear="nn.LazyLinear(8)"))
    (tmp_path / "nan.py").write_text(small(loss="(y * float('nan')).mean()"))
    (tmp_path / "steep.py").write_text(small(loss="(y - y).abs().sqrt().mean()"))
    (tmp_path / "index.py").write_text(small(loss="y.argmax()"))
    (tmp_path / "frozen.py").write_text(small(linear="nn.Linear(4, 8).requires_grad_(False)"))
    (tmp_path / "notes.txt").write_text("no model\n")
    return tmp_path


def listing(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if "__pycache__" not in p.parts}


CASES = {
    "missing file": (["none.py", "--gpus", "2"], 2, ["none.py"]),
    "a folder": ([".", "--gpus", "2"], 2, ["."]),
    "no Python file": (["notes.txt", "--gpus", "2"], 2, ["notes.txt"]),
    "no module": (["empty.py", "--gpus", "2"], 2, ["empty.py", "build()"]),
    "several candidates": (["two.py", "--gpus", "2"], 2, ["two.py:First", "two.py:Second"]),
    "no such name": (["net.py:Nett", "--gpus", "2"], 2, ["Nett", "build"]),
    "syntax error": (["broken.py", "--gpus", "2"], 4, ["broken.py", "SyntaxError"]),
    "raises": (["raises.py", "--gpus", "2"], 4, ["ZeroDivisionError", "raises.py:2"]),
    "an import that is missing": (["needs.py", "--gpus", "2"], 4, ["no_such_module_at_all", "needs.py:1", "installed"]),
    "no shape yet": (["lazy.py", "--gpus", "2"], 4, ["l.weight", "LazyLinear"]),
    "no finite loss": (["nan.py", "--gpus", "2"], 4, ["the loss infinite or not a number", "inputs"]),
    "no finite gradient": (["steep.py", "--gpus", "2"], 4, ["the gradient of l.weight infinite or not a number"]),
    "a loss of integers": (["index.py", "--gpus", "2"], 4, ["int64", "loss(output, *inputs)"]),
    "nothing to train": (["frozen.py", "--gpus", "2"], 4, ["frozen", "requires_grad"]),
    "a rank slow twice": (["net.py", "--gpus", "2", "--slow", "rank=0:2", "--slow", "rank=0:3"], 2, ["rank 0", "one"]),
    "a rank as good as dead": (["net.py", "--gpus", "2", "--slow", "rank=0:1e300"], 2, ["rank 0", "1000"]),
    "too little memory for any program": (["net.py", "--gpus", "2", "--hbm-gib", "0.1"], 2, ["0.1", "GiB"]),
    "no network": (["net.py", "--gpus", "2", "--nic-gbit-per-second", "inf"], 2, ["nic_gbit_per_second", "finite"]),
    "wrong --set key": (["net.py", "--gpus", "2", "--set", "widht=4"], 2, ["widht", "vocabulary, width"]),
    "wrong --set value": (["net.py", "--gpus", "2", "--set", "width=wide"], 2, ["width", "int"]),
    "no inputs": (["no_inputs.py", "--gpus", "2"], 2, ["no_inputs.py", "--input"]),
    "unreadable input": (["no_inputs.py", "--gpus", "2", "--input", "ids=int64"], 2, ["ids=int64", "int64[B,1024]"]),
    "unknown dtype": (["no_inputs.py", "--gpus", "2", "--input", "ids=int65[B,4]"], 2, ["int65"]),
    "wrong dtype": (["no_inputs.py", "--gpus", "2", "--input", "ids=float32[B,4]"], 4, ["no_inputs.py"]),
    "wrong input name": (["no_inputs.py", "--gpus", "2", "--input", "idx=int64[B,4]"], None, ["idx"]),
    "more GPUs than batch": (["net.py", "--gpus", "8", "--batch-size", "4", "--mesh", "dp=8"], None, ["8", "4"]),
    "mesh of other GPUs": (["net.py", "--gpus", "8", "--mesh", "dp=2,tp=2,pp=1,cp=1"], None, ["8"]),
    "nothing divides": (["net.py", "--gpus", "7", "--mesh", "tp=7", "--cluster", "h100-sxm"], None, ["7"]),
    "more stages than units": (["net.py", "--gpus", "64", "--mesh", "pp=64"], None, ["64"]),
    "memory": (
        ["net.py", "--gpus", "2", "--set", "vocabulary=100000000", "--set", "width=4096"], 3, ["GiB"],
    ),
    "unknown cluster": (["net.py", "--gpus", "2", "--cluster", "h100-smx"], 2, ["h100-sxm"]),
    "unknown stack": (["net.py", "--gpus", "2", "--stack", "fast"], 2, ["eager"]),
    "more GPUs than the cluster": (["net.py", "--gpus", "13", "--cluster", "h100-sxm"], 2, ["13"]),
    "unknown schedule": (["net.py", "--gpus", "2", "--mesh", "pp=2", "--schedule", "1fb1"], 2, ["1f1b"]),
    "microbatch size": (["net.py", "--gpus", "2", "--batch-size", "8", "--microbatch-size", "3"], None, ["3"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_bad_input(run: Run, folder: Path, name: str) -> None:
    arguments, code, texts = CASES[name]
    before = listing(folder)
    found = run("plan", *arguments, "--quiet")
    assert found.code in ((code,) if code else (ExitCode.USAGE, ExitCode.INFEASIBLE)), found.err
    assert found.out == ""
    assert found.err.count("error: ") == 1
    assert "Traceback" not in found.err
    assert len(found.err) < 1500
    for text in texts:
        assert text in found.err
    assert listing(folder) == before


@pytest.mark.parametrize("place", ["forward", "build", "import"])
def test_a_model_that_interrupts_itself(run: Run, folder: Path, place: str) -> None:
    """Code 130 is that of Ctrl-C; a model's own interrupt is said to be one."""
    texts = {
        "forward": MODEL.replace("return self.head", "raise KeyboardInterrupt\n        return self.head"),
        "build": MODEL.replace("return Net(", "raise KeyboardInterrupt\n    return Net("),
        "import": "raise KeyboardInterrupt\n" + MODEL,
    }
    (folder / "stops.py").write_text(texts[place])
    found = run("plan", "stops.py", "--gpus", "1", "--quiet")
    assert (found.code, found.out) == (ExitCode.INTERRUPTED, "")
    assert found.err.startswith("interrupted: the model raised KeyboardInterrupt\n  where: stops.py:")
    assert f" in {'<module>' if place == 'import' else place}: raise KeyboardInterrupt" in found.err


def test_what_a_model_prints_is_no_part_of_the_answer(run: Run, folder: Path) -> None:
    (folder / "loud.py").write_text(
        "print('imported')\n" + MODEL.replace("super().__init__()", "super().__init__(); print('built')")
    )
    found = run("plan", "loud.py", "--gpus", "2", "--json")
    assert json.loads(found.out)["gpus"] == 2
    assert "imported" in found.err


def test_folder_that_is_not_empty(run: Run, folder: Path) -> None:
    out = folder / "net-autopar"
    out.mkdir()
    (out / "train.py").write_text("mine\n")
    found = run("plan", "net.py", "--gpus", "2", "--quiet")
    assert (found.code, found.out) == (ExitCode.USAGE, "")
    assert "train.py" in found.err
    assert "--force" in found.err
    assert listing(out) == {"train.py"}
    assert (out / "train.py").read_text() == "mine\n"


@pytest.mark.parametrize("out", ["net.py", "net.py/inside"])
def test_folder_that_cannot_be(run: Run, folder: Path, out: str) -> None:
    before = listing(folder)
    found = run("plan", "net.py", "--gpus", "1", "--quiet", "--out", out)
    assert (found.code, found.out) == (ExitCode.USAGE, "")
    assert "--out" in found.err
    assert listing(folder) == before
