"""Dropout in the emitted code: replicated values draw alike on all ranks, split ones differ, recomputation repeats."""

from dataclasses import replace
from pathlib import Path

import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.compiler.verify.ranks import run_ranks
from autopar.planner.driver import PlanRequest, make_plan
from autopar.planner.placements import program_of
from autopar.planner.search.step_collectives import expected_collectives
from autopar.planner.sharding.program import Compute

GPT = Path(__file__).resolve().parents[2] / "sample_models" / "gpt.py"
BATCH_SIZE = 8
TP, DP = 2, 2
RANDOM = ("aten.dropout.default", "aten.scaled_dot_product_attention.default")

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def draws_of_rank(package, store, rank):
    """What every random call of two steps drew: two lists, in order of the calls, recomputed ones included.

    A dropout is what it kept; an attention, whose weights nobody sees, is the seed that it draws from.
    """
    import importlib

    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    draws = []
    dropout, attention = F.dropout, F.scaled_dot_product_attention

    def recorded_dropout(x, *args, **kwargs):
        result = dropout(x, *args, **kwargs)
        draws.append((result != 0).tolist())
        return result

    def recorded_attention(*args, **kwargs):
        draws.append(torch.initial_seed())
        return attention(*args, **kwargs)

    # The emitted code looks them up when it calls them. A function mode would miss what is recomputed in the backward.
    F.dropout, F.scaled_dot_product_attention = recorded_dropout, recorded_attention

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=TP * DP)
    import sys

    sys.path.insert(0, package)
    emitted = importlib.import_module("sharded_model")
    mesh = emitted.build_mesh("cpu")
    stage = emitted.build_stage(mesh, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(torch.randn(local.shape, generator=generator) * 0.1 + 0.01)
    ids = torch.randint(256, (BATCH_SIZE // DP, 64), generator=generator)
    steps = []
    for step in (0, 1):
        emitted.train_step(stage, mesh, {"ids": ids, "targets": ids}, step)
        steps.append(draws.copy())
        draws.clear()
    dist.destroy_process_group()
    return steps


def split_draws(plan, graph):
    """For every random operation of the forward pass, in order: whether tp splits its result."""
    program = program_of(plan, graph)
    found = []
    for unit in graph.units:
        for step in program.templates[unit.template].steps:
            if isinstance(step, Compute) and step.node.op in RANDOM:
                found.append("tp" in step.results[0].layout)
    return found


def without_tp(plan, graph):
    """The same plan with everything computed alike on both tp ranks."""
    placements = {
        template: {
            node: kept for node, labels in nodes.items() if (kept := {a: v for a, v in labels.items() if a != "tp"})
        }
        for template, nodes in plan.placements.items()
    }
    changed = replace(plan, placements=placements)
    stages = [(stage.first, stage.last) for stage in plan.stages]
    collectives = expected_collectives(
        program_of(changed, graph), stages, zero=plan.zero, schedule=plan.schedule,
        activation_checkpoint=plan.activation_checkpoint,
    )  # fmt: skip
    return replace(changed, collectives=collectives)


@pytest.fixture(scope="module")
def planned():
    return make_plan(
        PlanRequest(
            model=f"{GPT}:build",
            arguments={"dropout": "0.2", "num_layers": "2"},
            gpus=TP * DP,
            batch_size=BATCH_SIZE,
            mesh={"pp": 1, "dp": DP, "tp": TP},
            microbatch_size=BATCH_SIZE // DP,
            activation_checkpoint="full",
        )
    )


@pytest.mark.parametrize("is_split", [True, False], ids=["split", "replicated"])
def test_draws(tmp_path, planned, is_split):
    plan = planned.plan if is_split else without_tp(planned.plan, planned.graph)
    package = tmp_path / "package"
    emit_package(plan, planned.graph, package, force=False)
    jobs = [(str(package), str(tmp_path / "store"), rank) for rank in range(TP * DP)]
    ranks, failure = run_ranks(draws_of_rank, jobs, timeout_seconds=300)
    assert failure is None, failure.traceback
    splits = split_draws(plan, planned.graph)
    assert any(splits) == is_split
    count = len(splits)
    for step in (0, 1):
        forward = [rank[step][:count] for rank in ranks]
        for call, split in enumerate(splits):
            # Ranks 0 and 1 are neighbours on tp, 0 and 2 on dp.
            assert (forward[0][call] == forward[1][call]) is not split, f"draw {call}"
            assert forward[0][call] != forward[2][call], f"draw {call}: data-parallel ranks draw alike"
        # What is recomputed in the backward was drawn before.
        for rank in ranks:
            again = rank[step][count:]
            assert again, "nothing was recomputed"
            assert all(draw in rank[step][:count] for draw in again)
        assert len({str(draw) for draw in forward[0]}) == count, "two operations draw alike"
    assert all(first != second for first, second in zip(ranks[0][0][:count], ranks[0][1][:count], strict=True))


def test_values_and_collectives_without_dropout(tmp_path, planned):
    package = tmp_path / "package"
    emit_package(planned.plan, planned.graph, package, force=False)
    report = verify(planned.plan, package, graph=planned.graph)
    assert report.ok, "\n".join(report.lines(verbose=True))
    assert any("dropout" in note for note in report.notes)
