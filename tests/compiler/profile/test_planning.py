"""Plans for a profiled machine: what PyTorch's machinery takes counts where the emitted code has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from autopar.compiler.profile.document import describe
from autopar.planner.driver import PlanRequest, capture, check_request, plan_graph

from .measured import measurements

MLP = Path(__file__).resolve().parents[3] / "sample_models" / "mlp.py"
HOST_KEYS = {
    "action": [("pp", 0)],
    "parameter_backward": [("tp", 0)],
    "fsdp_group_forward": [("dp", 3)],
    "step": [("pp", 0), ("tp", 0), ("dp", 0), ("dp", 3)],
}


@pytest.mark.parametrize("name", HOST_KEYS)
def test_host_costs_reach_their_strategies(tmp_path: Path, name: str) -> None:
    text = describe(measurements("cpu"), source="measured").text()
    pattern = rf"^{name}_microseconds = {{ value = [\d.e+]+"
    raised, count = re.subn(pattern, f"{name}_microseconds = {{ value = 1e6", text, flags=re.MULTILINE)
    assert count == 1
    (tmp_path / "base.toml").write_text(text)
    (tmp_path / "raised.toml").write_text(raised)
    request = PlanRequest(model=str(MLP), gpus=2, batch_size=32)
    graph, request = capture(request)
    slower = []
    for axis, zero in (("pp", 0), ("tp", 0), ("dp", 0), ("dp", 3)):
        seconds = []
        for cluster in ("base", "raised"):
            pinned = replace(
                request,
                cluster=str(tmp_path / f"{cluster}.toml"),
                mesh={"pp": 1, "dp": 1, "tp": 1, axis: 2},
                zero=zero,
                microbatch_size=16 if axis == "dp" else 32,
                activation_checkpoint="none",
            )
            seconds.append(plan_graph(graph, pinned, check_request(pinned)).plan.step_seconds)
        if seconds[1] > seconds[0] + 0.5:
            slower.append((axis, zero))
    assert slower == HOST_KEYS[name]
