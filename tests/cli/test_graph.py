"""autopar graph: the numbers agree with each other, and the picture is written or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from autopar.cli.exit_codes import ExitCode

Run = Callable[..., Any]

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return (self.left(x) * self.right(x)).sum()

def example_inputs(batch_size: int = 8):
    return (torch.randn(batch_size, 16),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def test_numbers(run: Run, folder: Path) -> None:
    found = run("graph", "net.py", "--gpus", "4", "--batch-size", "32", "--json", "--quiet")
    assert found.code == ExitCode.DONE, found.err
    data = json.loads(found.out)
    assert data["batch_size"] == 32
    for unit in ("flops", "seconds"):
        numbers = data[unit]
        assert 0 < numbers["depth"] < numbers["work"]
        assert numbers["brent_low"] == max(numbers["work"] / 4, numbers["depth"])
        assert numbers["brent_high"] == pytest.approx(numbers["work"] / 4 + numbers["depth"])
    # Two independent products of 32 x 16 x 16; only one of them is on the longest path.
    product = 2 * 32 * 16 * 16
    assert 2 * product < data["flops"]["forward_work"] < 3 * product
    assert product < data["flops"]["forward_depth"] < 2 * product


def test_table_and_picture(run: Run, folder: Path) -> None:
    found = run("graph", "net.py", "--out", "net.svg")
    assert found.code == ExitCode.DONE, found.err
    assert "average parallelism W/D" in found.out
    assert "written: net.svg" in found.err
    text = (folder / "net.svg").read_text()
    ElementTree.fromstring(text)
    assert "average parallelism W/D: " in text
    again = run("graph", "net.py", "--out", "net.svg")
    assert again.code == ExitCode.USAGE
    assert "--force" in again.err
    assert run("graph", "net.py", "--out", "net.svg", "--force", "--quiet").err == ""


@pytest.mark.parametrize("out", ["net.png", "net", "none/net.svg"])
def test_picture_that_cannot_be(run: Run, folder: Path, out: str) -> None:
    found = run("graph", "net.py", "--out", out, "--quiet")
    assert (found.code, found.out) == (ExitCode.USAGE, "")
    assert found.err.startswith("error: cannot ")
