"""Runs a function on forked gloo ranks."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh


def _rank(rank: int, function: Callable, shape: tuple[int, ...], names: tuple[str, ...], store: str, results) -> None:
    torch.set_num_threads(1)
    size = prod(shape)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        results.put((rank, function(init_device_mesh("cpu", shape, mesh_dim_names=names)), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable:
    """`on_ranks(function, dp=1, tp=2)` calls `function(mesh)` on every rank; results by rank, without tensors."""
    count = 0

    def run(function: Callable, **axes: int) -> list:
        nonlocal count
        count += 1
        shape, names = tuple(axes.values()), tuple(axes)
        size = prod(shape)
        results = multiprocessing.get_context("fork").SimpleQueue()
        context = multiprocessing.start_processes(
            _rank,
            (function, shape, names, str(tmp_path / f"store{count}"), results),
            nprocs=size,
            join=False,
            start_method="fork",
        )
        try:
            deadline = time.monotonic() + 120
            while not context.join(timeout=5):
                assert time.monotonic() < deadline, "the ranks did not end in two minutes"
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        found: list = [None] * size
        for _ in range(size):
            rank, value, error = results.get()
            assert not error, f"rank {rank}:\n{error}"
            found[rank] = value
        return found

    return run
