"""What is measured on every rank, phase by phase; each phase runs in freshly forked processes."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .kernels import (
    AttentionTime,
    LaunchTimes,
    Memory,
    ProductTime,
    measure_attention,
    measure_launches,
    measure_memory,
    measure_products,
    measure_streaming,
    measure_sustained,
    measure_transcendental,
)
from .machinery import Machinery, measure_machinery
from .messages import MessageTime, measure_hidden, measure_messages

# Rates of a GPU's matrix units, and those that a CPU may lack units for.
CPU_DTYPES, CUDA_DTYPES = ("float32", "float64", "bfloat16", "float16"), (
    "bfloat16", "float16", "float32", "tf32", "float64",
)  # fmt: skip
_SLOW_ON_CPU = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """One phase on one rank. `argument`: of the phase."""

    rank: int
    ranks: int
    device: str
    store: str
    phase: str
    argument: str | int | None
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was measured, as rank 0 saw it. `products` by dtype."""

    device: str
    device_name: str
    ranks: int
    sm_count: int
    memory: Memory
    products: dict[str, tuple[ProductTime, ...]]
    sustained_fraction: float
    streaming: tuple[tuple[int, float, float], ...]
    transcendental_seconds: float
    attention: tuple[AttentionTime, ...]
    launches: LaunchTimes
    machinery: Machinery
    messages: tuple[MessageTime, ...]
    hidden_fraction: float | None


def measure_phase(job: RankJob) -> object:
    """Join the group, measure one phase, leave. A rank that fails does not wait for the others: they are ended."""
    torch.set_num_threads(1)
    own = torch.device("cuda", job.rank) if job.device == "cuda" else None
    if own is not None:
        torch.cuda.set_device(own)
    dist.init_process_group(
        "gloo" if own is None else "nccl",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.ranks,
        timeout=timedelta(seconds=job.timeout_seconds),
        device_id=own,
    )
    answer = PHASES[job.phase](job)
    dist.barrier()  # one that leaves early would break off the joining of another
    dist.destroy_process_group()
    return answer


def _products(job: RankJob) -> object:
    assert isinstance(job.argument, str)
    return measure_products(job.device, job.argument, is_slow=job.device == "cpu" and job.argument in _SLOW_ON_CPU)


def _messages(job: RankJob) -> object:
    assert isinstance(job.argument, int)
    return measure_messages(job.device, job.ranks, job.argument)


PHASES: dict[str, Callable[[RankJob], object]] = {
    "products": _products,
    "sustained rate": lambda job: measure_sustained(job.device),
    "memory bandwidth": lambda job: measure_streaming(job.device),
    "functions": lambda job: measure_transcendental(job.device),
    "attention": lambda job: measure_attention(job.device),
    "launches": lambda job: measure_launches(job.device),
    "memory": lambda job: measure_memory(job.device, job.ranks),
    "machinery": lambda job: measure_machinery(job.device, job.ranks),
    "collectives": _messages,
    "overlap": lambda job: measure_hidden(job.device),
    "device": lambda job: _device(job.device),
}


def _device(device: str) -> tuple[str, int]:
    """Name and number of multiprocessors."""
    if device == "cuda":
        properties: Any = torch.cuda.get_device_properties(0)
        return properties.name, properties.multi_processor_count
    return cpu_name(Path("/proc/cpuinfo")), 1


def cpu_name(path: Path) -> str:
    """The processor's name, from Linux where it says it."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def num_gpus() -> int:
    """CUDA devices that NCCL can use; counted without touching one."""
    cuda = importlib.import_module("torch.cuda")
    return cuda.device_count() if dist.is_nccl_available() else 0
