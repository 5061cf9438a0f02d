"""Measures collectives by operation, ranks and message size, and what of them hides behind compute."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .timing import Stopwatch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
_CPU_BYTES = (256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
_CUDA_BYTES = (1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
_LARGEST_QUICK = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """One operation over `ranks` ranks. Bytes as `cost_models.communication` counts them."""

    op: str
    ranks: int
    num_bytes: int
    seconds: float


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Powers of two, and all."""
    sizes = {ranks}
    size = 2
    while size < ranks:
        sizes.add(size)
        size *= 2
    return tuple(sorted(sizes))


def measure_messages(device: str, ranks: int, size: int) -> tuple[MessageTime, ...]:
    """Every operation among the first `size` ranks; the others wait. What rank 0 saw."""
    watch = Stopwatch(device=device)
    group = dist.new_group(list(range(size)))
    found: list[MessageTime] = []
    if dist.get_rank() < size:
        for op in OPS:
            for num_bytes in _CPU_BYTES if watch.is_cpu else _CUDA_BYTES:
                seconds = _seconds(watch, _message(op, num_bytes, size, device, group), num_bytes, group)
                found.append(MessageTime(op=op, ranks=size, num_bytes=num_bytes, seconds=seconds))
    dist.barrier()
    return tuple(found)


def _message(op: str, num_bytes: int, size: int, device: str, group: Any) -> Callable[[], object]:
    count = max(num_bytes // 4 // size, 1) * size
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // size, device=device)
    rank = dist.get_rank()
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(whole, part, group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, group=group)
    if op == "all_to_all":
        received = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(received, whole, group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0, group=group)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(whole, 1, group=group)
        elif rank == 1:
            dist.recv(whole, 0, group=group)
            dist.send(whole, 0, group=group)

    return there_and_back


def _seconds(watch: Stopwatch, run: Callable[[], object], num_bytes: int, group: Any) -> float:
    """Wall seconds on this rank, the least of many; a send is half of there and back.

    Only the wall clock sees a message, and whatever else a shared machine does only makes it longer.
    """
    times: list[float] = []
    for attempt in range(42 if num_bytes <= _LARGEST_QUICK else 22):
        dist.barrier(group=group)
        watch.wait()
        begin = time.perf_counter()
        run()
        watch.wait()
        if attempt >= 2:
            times.append(time.perf_counter() - begin)
    return min(times) / (2 if "there_and_back" in getattr(run, "__name__", "") else 1)


def measure_hidden(device: str) -> float:
    """What disappears of the shorter of compute and an all_reduce that run at the same time, from 0 to 1."""
    watch = Stopwatch(device=device)
    size = 384 if watch.is_cpu else 4096
    a = torch.randn(size, size, device=device)
    message = torch.zeros((1 << 20) if watch.is_cpu else (1 << 26), device=device)

    def wall(run: Callable[[], object]) -> float:
        times: list[float] = []
        for attempt in range(14):
            dist.barrier()
            watch.wait()
            begin = time.perf_counter()
            run()
            watch.wait()
            if attempt >= 2:
                times.append(time.perf_counter() - begin)
        return min(times)

    communication = wall(lambda: dist.all_reduce(message))
    once = wall(lambda: torch.mm(a, a))
    # The same number of products on every rank, so that they meet again.
    shared = torch.tensor([communication, once], device=device)
    dist.all_reduce(shared)
    repeats = max(1, round(float(shared[0] / shared[1])))

    def compute() -> None:
        for _ in range(repeats):
            torch.mm(a, a)

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        assert work is not None
        work.wait()

    computing, together = wall(compute), wall(both)
    hidden = (computing + communication - together) / min(computing, communication)
    return min(1.0, max(0.0, hidden))
