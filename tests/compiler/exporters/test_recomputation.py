"""Activation checkpointing changes nothing: dropout draws repeat, running statistics are updated once."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from autopar.compiler.exporters.pytorch import Provenance, options_of, render_files
from autopar.compiler.lower import lower
from autopar.compiler.verify.ranks import run_ranks
from autopar.planner.capture import capture_model
from autopar.planner.placements import program_of
from autopar.planner.plan_json import read_plan

GOLDEN = Path(__file__).parents[1] / "golden"

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def step_of_rank(package: str, store: str, rank: int, world_size: int, shares: dict) -> dict[str, np.ndarray]:
    """The loss, gradients and buffers after one training step from weights drawn with a fixed seed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    sys.path.insert(0, package)
    emitted = importlib.import_module("sharded_model")
    mesh = emitted.build_mesh("cpu")
    stage = emitted.build_stage(mesh, "cpu")
    stage.train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for buffer in stage.buffers():
            buffer.zero_()
    loss = emitted.train_step(stage, mesh, {name: torch.from_numpy(share) for name, share in shares.items()}, 3)
    found = {name: p.grad.clone() for name, p in stage.named_parameters() if p.grad is not None}
    found |= {name: buffer.clone() for name, buffer in stage.named_buffers()}
    dist.destroy_process_group()
    return {name: value.numpy() for name, value in {"loss": loss, **found}.items()}


@pytest.mark.parametrize("name", ["gpt_pp4_dropout", "resnet_pp2"])
def test_recomputation_repeats_the_forward(name: str, tmp_path: Path) -> None:
    plan = read_plan(GOLDEN / name / "plan.json")
    graph = capture_model(plan.model.path, arguments=plan.model.arguments, batch_size=plan.batch_size).graph
    model = lower(program_of(plan, graph), [(stage.first, stage.last) for stage in plan.stages])
    generator = torch.Generator().manual_seed(1)
    shares = {}
    for value in graph.inputs:
        is_index = value.type.dtype.startswith("int")
        draw = torch.randint(10, value.type.shape, generator=generator)
        shares[value.name] = (draw if is_index else draw.float() / 10).numpy()
    world_size = prod(plan.mesh.values())
    results = {}
    for policy in ("none", "selective", "full"):
        package = tmp_path / policy
        package.mkdir()
        options = options_of(replace(plan, activation_checkpoint=policy))
        files = render_files(model, options, Provenance(version="0", source="", plan=""))
        for file, text in files.items():
            (package / file).write_text(text, encoding="utf-8")
        jobs = [(str(package), str(package / "store"), rank, world_size, shares) for rank in range(world_size)]
        results[policy], failure = run_ranks(step_of_rank, jobs, timeout_seconds=300)
        assert failure is None, failure.traceback
        assert ("keep_results" in files["sharded_model.py"]) == (policy == "selective")
        assert ("checkpoint(" in files["sharded_model.py"]) == (policy != "none")
    pairs = [pair for policy in ("selective", "full") for pair in zip(results["none"], results[policy], strict=True)]
    for plain, again in pairs:
        assert plain.keys() == again.keys()
        assert len(plain) > 1
        for key, value in plain.items():
            assert np.array_equal(value, again[key]), key
            assert np.isfinite(value).all()
