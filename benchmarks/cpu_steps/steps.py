"""Runs the steps of several emitted packages on the same ranks in turns, so that a slow spell meets all alike."""

from __future__ import annotations

import importlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

MAX_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsJob:
    """What a rank needs: packages, and a file with the whole batch's inputs of each."""

    rank: int
    world_size: int
    packages: tuple[str, ...]
    inputs: str
    store: str
    rounds: int
    warmup: int


def _imported(package: str) -> Any:
    for name in ("sharded_model", "collectives"):
        sys.modules.pop(name, None)
    sys.path.insert(0, package)
    try:
        return importlib.import_module("sharded_model")
    finally:
        sys.path.remove(package)


def _step_of(package: str, inputs: Any, batch_dims: Any) -> Any:
    """A function that runs one training step of the package as its train.py does."""
    import torch

    emitted = _imported(package)
    mesh = emitted.build_mesh("cpu")
    stage = emitted.build_stage(mesh, torch.device("cpu"))
    with torch.no_grad():
        for parameter in stage.parameters():
            torch.nn.init.normal_(parameter.to_local() if hasattr(parameter, "to_local") else parameter, std=0.02)
        for buffer in stage.buffers():
            buffer.fill_(0.5)
    stage.train()
    # Under ZeRO-1 the optimizer has parts of the parameters.
    updated = emitted.optimized(stage) if hasattr(emitted, "optimized") else stage
    optimizer = torch.optim.AdamW([{"params": list(updated.parameters())}], lr=1e-4, weight_decay=0.01)
    if "dp" in mesh.mesh_dim_names:
        dp = mesh["dp"]
        inputs = {
            name: value if batch_dims[name] is None
            else value.chunk(dp.size(), batch_dims[name])[dp.get_local_rank()].contiguous()
            for name, value in inputs.items()
        }  # fmt: skip

    def step(number: int) -> None:
        optimizer.zero_grad()
        emitted.train_step(stage, mesh, inputs, number)
        emitted.clip_gradients(stage, mesh, MAX_NORM)
        optimizer.step()

    return step


def run_steps(job: StepsJob) -> list[list[tuple[float, float]]]:
    """(seconds, processor seconds of the busiest rank) of every step, by package.

    From when all ranks are ready until the last is done.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", str(job.rank))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=300),
    )
    inputs, batch_dims = torch.load(job.inputs, weights_only=False)
    steps = [_step_of(package, inputs, batch_dims) for package in job.packages]
    found: list[list[tuple[float, float]]] = [[] for _ in steps]
    took = torch.zeros(2)
    for number in range(job.warmup + job.rounds):
        for index, step in enumerate(steps):
            dist.barrier()
            begin, used = time.perf_counter(), time.process_time()
            step(number)
            took[0], took[1] = time.perf_counter() - begin, time.process_time() - used
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number >= job.warmup:
                found[index].append((float(took[0]), float(took[1])))
    dist.destroy_process_group()
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Steps of one package. `spread` is the middle half of the runs.

    `processor_seconds`: the median of what the busiest rank used of its core; far below the wall clock where other
    processes had it.
    """

    seconds: tuple[float, ...]
    processor_seconds: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def measure_steps(packages: Sequence[str], inputs: str, folder: str, *, ranks: int, rounds: int) -> list[Measured]:
    """Interleaved steps of all packages on `ranks` forked processes.

    Raises:
        RuntimeError: a rank failed.
    """
    from autopar.compiler.verify.ranks import run_ranks

    jobs = [
        StepsJob(
            rank=rank,
            world_size=ranks,
            packages=tuple(packages),
            inputs=inputs,
            store=os.path.join(folder, "store"),
            rounds=rounds,
            warmup=2,
        )
        for rank in range(ranks)
    ]
    answers, failure = run_ranks(run_steps, [(job,) for job in jobs], timeout_seconds=600)
    if failure is not None:
        raise RuntimeError(f"rank {failure.rank}: {failure.error}\n{failure.traceback}")
    times = answers[0]
    assert isinstance(times, list)
    return [
        Measured(
            seconds=tuple(wall for wall, _ in runs),
            processor_seconds=statistics.median(used for _, used in runs),
        )
        for runs in times
    ]
