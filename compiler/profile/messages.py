"""Measures collectives by operation, ranks and message size, and what of them hides behind compute."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .timing import Stopwatch, cold_copies, short_work

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
_CPU_BYTES = (256, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20)
_CUDA_BYTES = (1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
_LARGEST_QUICK = 1 << 20
_REPEATS, _ATTEMPTS = 24, 16
_LEAST_SECONDS = 1e-6


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
        work = short_work(watch)
        for op in OPS:
            for num_bytes in _CPU_BYTES if watch.is_cpu else _CUDA_BYTES:
                message = _message(op, num_bytes, size, device, group, work)
                seconds = _seconds(watch, work, message, num_bytes, group)
                found.append(MessageTime(op=op, ranks=size, num_bytes=num_bytes, seconds=seconds))
    dist.barrier()
    return tuple(found)


def _message(
    op: str, num_bytes: int, size: int, device: str, group: Any, work: Callable[[], object]
) -> Callable[[], object]:
    """What every rank runs after its work: the message; both directions and the other's work of a send."""
    count = max(num_bytes // 4 // size, 1) * size
    # What a step sends it has just made, and other memory every time.
    wholes, others = (cold_copies((count,), device) for _ in range(2))
    parts = cold_copies((count // size,), device)
    rank = dist.get_rank()
    if op == "all_reduce":
        return lambda: dist.all_reduce(next(wholes), group=group)
    if op == "all_gather":
        return lambda: dist.all_gather_single(next(wholes), next(parts), group=group)
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(next(parts), next(wholes), group=group)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(next(others), next(wholes), group=group)
    if op == "broadcast":
        return lambda: dist.broadcast(next(wholes), 0, group=group)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(next(wholes), 1, group=group)
            dist.recv(next(others), 1, group=group)
        elif rank == 1:
            dist.recv(next(others), 0, group=group)
            work()
            dist.send(next(wholes), 0, group=group)

    return there_and_back


def _seconds(
    watch: Stopwatch, work: Callable[[], object], message: Callable[[], object], num_bytes: int, group: Any
) -> float:
    """Wall seconds that messages between pieces of work add to the work alone, on this rank.

    As in a step, threads that move messages have gone to sleep and no rank comes at the same time as another: on a CPU
    that is most of what a short message takes. A send is half of there and back.
    """
    is_send = "there_and_back" in getattr(message, "__name__", "")
    rank = dist.get_rank(group)

    def wall(run: Callable[[], object]) -> float:
        dist.barrier(group=group)
        watch.wait()
        begin = time.perf_counter()
        for _ in range(_REPEATS):
            run()
        watch.wait()
        return (time.perf_counter() - begin) / _REPEATS

    def both() -> None:
        if rank == 0 or not is_send:
            work()
        message()

    ends = 2 if is_send else 1
    attempts = _ATTEMPTS if num_bytes <= _LARGEST_QUICK else _ATTEMPTS // 2
    # In turns, so that a slow spell of the machine meets both.
    added = [wall(both) / ends - wall(work) for _ in range(attempts)][2:]
    return max(statistics.median(added), _LEAST_SECONDS)


def measure_hidden(device: str) -> float:
    """What disappears of the shorter of compute and an all_reduce that run at the same time, from 0 to 1."""
    watch = Stopwatch(device=device)
    size, kind = (384, torch.float32) if watch.is_cpu else (4096, torch.bfloat16)
    a = torch.randn(size, size, device=device, dtype=kind)
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
