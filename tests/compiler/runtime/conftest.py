"""Runs a function of a test file on forked gloo ranks, from a fresh process: autograd that ran before a fork hangs."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh

TIMEOUT_SECONDS = 120


@pytest.fixture(scope="session")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`on_ranks(function, dp=2, tp=2)` calls `function(mesh)` on every rank; what it returns, by rank, through JSON."""

    def run(function: Callable, **axes: int) -> list:
        tmp_path = tmp_path_factory.mktemp("ranks")
        order = [inspect.getfile(function), function.__name__, json.dumps(axes), str(tmp_path)]
        done = subprocess.run(
            [sys.executable, __file__, *order],
            timeout=TIMEOUT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(prod(axes.values()))]

    return run


def _rank(rank: int, function: Callable, axes: dict[str, int], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=prod(axes.values()),
        timeout=timedelta(seconds=60),
    )
    try:
        found = function(init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes)))
    except BaseException:
        traceback.print_exc()
        raise
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _main(file: str, name: str, axes: str, folder: str) -> None:
    spec = importlib.util.spec_from_file_location("ranks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes = json.loads(axes)
    multiprocessing.start_processes(
        _rank,
        (getattr(module, name), sizes, folder),
        nprocs=prod(sizes.values()),
        start_method="fork",
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
