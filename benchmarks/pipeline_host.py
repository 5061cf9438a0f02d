"""Host time of pipeline schedules: what PyTorch's runtime takes per action beside the operations of the stage.

Two forked gloo ranks run each schedule on stages of one tiny product; the main thread's CPU time per action, less that
of the same forwards and backwards without a pipeline, is divided by the CPU time of one eager operation. Waiting does
not count, so a busy machine hardly changes the ratio, and it carries over to hosts that are faster or slower alike.

    python benchmarks/pipeline_host.py

Source of `LAUNCHES_PER_PIPELINE_ACTION` in cost_models/hardware/gpu.py.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from autopar.planner.schedules import get_schedule
from torch import nn
from torch.distributed import pipelining

RANKS = 2
FEW, MANY = 2, 32  # microbatches of a step: what does not grow with them is the step's own
SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2))


class Stage(nn.Module):
    """One product and a sum: the least that has gradients of inputs and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def eager_operation_seconds(count: int = 20_000) -> float:
    x = torch.zeros(4)
    begin = time.thread_time()
    for _ in range(count):
        x = x + 1
    return (time.thread_time() - begin) / count


def plain_seconds(repeats: int) -> float:
    """Forward and backward of one microbatch through one stage without a pipeline."""
    stage, x = Stage(), torch.zeros(1, 4, requires_grad=True)
    begin = time.thread_time()
    for _ in range(repeats * MANY):
        stage(x).sum().backward()
    return (time.thread_time() - begin) / (repeats * MANY)


def step_seconds(name: str, per_rank: int, rank: int, microbatches: int, repeats: int) -> float:
    """CPU time of one step of a schedule."""
    schedule, num_stages = get_schedule(name), RANKS * per_rank
    mine = schedule.stages_of(rank, RANKS, num_stages)
    x = torch.empty(1, 4, device="meta", requires_grad=True)
    stages = [
        pipelining.PipelineStage(
            Stage(), index, num_stages, torch.device("cpu"), input_args=(x,), output_args=(x,), group=dist.group.WORLD
        )
        for index in mine
    ]
    runner = getattr(pipelining, schedule.torch_class)(
        stages if schedule.is_multi_stage else stages[0], microbatches, loss_fn=lambda y, _: y.sum(), scale_grads=False
    )

    def step() -> None:
        numbers = torch.zeros(microbatches, 4)
        inputs = (torch.zeros(microbatches, 4),) if 0 in mine else ()
        target = {"target": numbers, "losses": []} if num_stages - 1 in mine else {}
        runner.step(*inputs, return_outputs=False, **target)

    step()
    found = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.thread_time()
        step()
        found.append(time.thread_time() - begin)
    return statistics.median(found)


def run(rank: int, store: str, repeats: int, queue: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    operation, plain = eager_operation_seconds(), plain_seconds(repeats)
    for name, per_rank in SCHEDULES:
        kinds = 3 if get_schedule(name).splits_backward else 2
        few, many = (step_seconds(name, per_rank, rank, count, repeats) for count in (FEW, MANY))
        whole = (many - few) / (MANY - FEW) / per_rank  # a microbatch through a stage
        action, step = (whole - plain) / kinds, few - FEW * per_rank * whole
        queue.put((name, rank, action, step, operation))  # type: ignore[attr-defined]
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    context = get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        ranks = [context.Process(target=run, args=(rank, store, arguments.repeats, queue)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        rows = [queue.get() for _ in range(RANKS * len(SCHEDULES))]
        for process in ranks:
            process.join()
    print(f"torch {torch.__version__}, {RANKS} gloo ranks, {FEW} and {MANY} microbatches")
    print("schedule        rank   us per action   us per step   eager operations per action   per step")
    for name, rank, action, step, operation in sorted(rows):
        line = f"{name:15} {rank:4} {action * 1e6:15.0f} {step * 1e6:13.0f}"
        print(f"{line} {action / operation:29.0f} {step / operation:10.0f}")


if __name__ == "__main__":
    main()
