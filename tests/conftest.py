"""Shared by all tests: one thread per process, the option that refreshes golden files, and an example plan."""

from __future__ import annotations

import os

# Before torch is imported anywhere: forked ranks share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from autopar.planner.plan import Alternative, CollectivePlan, ModelSource, Plan, SolverReport, StagePlan


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files instead of comparing with them")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be rewritten."""
    return bool(request.config.getoption("--update-golden"))


GIB = 2**30


def _stage(rank: int, first: int, last: int, fqns: tuple[str, ...]) -> StagePlan:
    memory = {"parameters": GIB, "gradients": GIB, "optimizer": 2 * GIB, "activations": 4 * GIB, "total": 8 * GIB}
    return StagePlan(
        first=first,
        last=last,
        fqns=fqns,
        num_parameters=1_000_000,
        forward_seconds=0.01,
        backward_seconds=0.02,
        step_seconds=0.001,
        memory_bytes=memory,
        rank=rank,
    )


@pytest.fixture
def example_plan() -> Plan:
    """A plan of a small transformer on pp=2, dp=2, tp=2; nothing reads a model for it."""
    return Plan(
        autopar_version="0.1.0",
        torch_version="2.13.0",
        fingerprint="sha256:0123",
        model=ModelSource(path="gpt.py", name="build", arguments={"preset": "tiny"}, inputs={}),
        cluster="h100-sxm",
        gpus=8,
        batch_size=16,
        precision="fp32",
        optimizer="adamw",
        stack="eager",
        mesh={"pp": 2, "dp": 2, "tp": 2},
        microbatches=4,
        schedule="1f1b",
        zero=2,
        activation_checkpoint="none",
        stages=(_stage(0, 1, 6, ("wte", "h.{0..3}")), _stage(1, 6, 12, ("h.{4..7}", "ln_f", "lm_head"))),
        placements={
            "Block": {"attn.c_attn.linear": {"dp": "b", "tp": "n"}, "mlp.c_proj.linear": {"dp": "b", "tp": "k"}},
            "Embedding": {"wte.embedding": {"dp": "b", "tp": "v"}},
        },
        tensors={
            "wte.weight": {"dp": "R/P", "tp": "S(0)"},
            "h.*.attn.c_attn.weight": {"dp": "R/P", "tp": "S(0;3)"},
            "h.*.mlp.c_proj.weight": {"dp": "R/P", "tp": "S(1)"},
            "ln_f.weight": {"dp": "R/P", "tp": "R/P"},
        },
        tensor_shapes={
            "wte.weight": (256, 64),
            "h.*.attn.c_attn.weight": (192, 64),
            "h.*.mlp.c_proj.weight": (64, 256),
            "ln_f.weight": (64,),
        },
        step_seconds=0.15,
        bubble_fraction=0.2,
        memory_capacity_bytes=80 * GIB,
        collectives=(
            CollectivePlan(stage=0, axis="tp", op="all_reduce", count=16, num_bytes=4096, reason="forward"),
            CollectivePlan(stage=0, axis="dp", op="reduce_scatter", count=4, num_bytes=65536, reason="fsdp"),
            CollectivePlan(stage=1, axis="tp", op="all_reduce", count=16, num_bytes=4096, reason="forward"),
        ),
        time_breakdown_seconds={"compute": 0.1, "tp": 0.02, "bubble": 0.03},
        alternatives=(
            Alternative(
                mesh={"pp": 1, "dp": 8, "tp": 1},
                microbatches=1,
                schedule="none",
                zero=3,
                activation_checkpoint="none",
                step_seconds=0.18,
                memory_bytes=9 * GIB,
                note="dp only",
            ),
            Alternative(
                mesh={"pp": 1, "dp": 1, "tp": 8},
                microbatches=1,
                schedule="none",
                zero=0,
                activation_checkpoint="none",
                step_seconds=None,
                memory_bytes=90 * GIB,
                note="tp only",
            ),
        ),
        solver=SolverReport(
            solver="HiGHS", status="within gap", bound_seconds=0.14, gap_fraction=0.07, candidates=40, solved=3
        ),
        pins={"mesh": "dp=2,tp=2,pp=2"},
    )
