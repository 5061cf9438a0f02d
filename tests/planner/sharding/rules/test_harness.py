"""The harness finds wrong rules: each wrong option of a known operation must be reported."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import PARTIAL, split
from harness import case, gathered, local_part, randn

# Each lie names an operation and the pairs of one operand and the output of an option that is not exact.
LIES = """
import sys
sys.path.insert(0, {here!r})
import harness
from dataclasses import replace
from autopar.planner.sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, split
from autopar.planner.sharding.rules import registry
from autopar.planner.sharding.rules.registry import Option

def lie(op, label, operands, outputs, extent=0):
    option = Option(label=label, operands=operands, outputs=outputs, extent=extent)
    registry._RULES[op] = replace(registry.rule_of(op), options=lambda node, types: (option,))

lie("aten.relu.default", "partial", (PARTIAL,), (PARTIAL,))
lie("aten.add.Tensor", "mixed", (PARTIAL, REPLICATED), (PARTIAL,))
lie("aten.softplus.default", "swapped", (split(0),), (split(1),), 4)
lie("aten.mm.default", "k", (split(1), split(0)), (REPLICATED,), 4)
lie("aten.mul.Tensor", "whole", (split(0), REPLICATED), (split(0),), 4)
registry.rule_of.cache_clear()
harness.main({folder!r})
"""


@pytest.mark.gloo
def test_wrong_options_are_reported(tmp_path: Path) -> None:
    x, y = randn(4, 4), randn(4, 4, seed=1)
    cases = (
        case("aten.relu.default", x),
        case("aten.add.Tensor", x, y),
        case("aten.softplus.default", x),
        case("aten.mm.default", x, y),
        case("aten.mul.Tensor", x, randn(4)),
    )
    plain = [(c.op, c.args, c.kwargs, c.no_grad, c.labels, c.groups) for c in cases]
    (tmp_path / "cases.pkl").write_bytes(pickle.dumps((plain, False)))
    script = LIES.format(here=str(Path(harness.__file__).parent), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    _, failures = pickle.loads((tmp_path / "report.pkl").read_bytes())
    text = "\n".join(failures)
    for op in ("relu", "add", "softplus", "mm", "mul"):
        assert f"aten.{op}." in text, f"{op} was not found wrong in\n{text}"


def test_parts_put_together_are_the_whole() -> None:
    x = randn(4, 12)
    axes = (Axis("dp", 2), Axis("tp", 2))
    layout = {"dp": split(1), "tp": split(1, 6)}
    parts = [
        local_part(x, layout, axes, harness.coordinates_of(r, axes), summed="P/R", seed=0).numpy() for r in range(4)
    ]
    assert all(part.shape == (4, 3) for part in parts)
    (whole,) = gathered(parts, x.shape, layout, axes, summed="P/R")
    assert torch.equal(whole, x)


def test_a_split_into_a_sum_adds_up() -> None:
    x = randn(4, 4)
    axes = (Axis("tp", 4),)
    layout = {"tp": PARTIAL}
    parts = [local_part(x, layout, axes, {"tp": r}, summed="P/R", seed=0).numpy() for r in range(4)]
    (whole,) = gathered(parts, x.shape, layout, axes, summed="P/R")
    assert torch.allclose(whole, x)
    assert not torch.allclose(torch.from_numpy(parts[0]), x)
