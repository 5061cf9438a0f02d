"""Seconds of short pieces of work, on a machine that others may be using too."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil, prod
from typing import Any

import torch

_BLOCK_SECONDS = 1e-3
_NUM_BLOCKS, _FEWEST_BLOCKS = 24, 3
_LONG_SECONDS = 0.5  # of all blocks together, where one run takes long
_MOST_IN_GRAPH = 64
_COLD_BYTES, _MOST_COPIES = 64 << 20, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times work on a device. Where the device is the CPU its thread's own time counts, not that of other processes."""

    device: str

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def now(self) -> float:
        """The host thread's clock; on a GPU a wall clock."""
        return time.thread_time() if self.is_cpu else time.perf_counter()

    def wait(self) -> None:
        """Until the device is idle."""
        if not self.is_cpu:
            torch.cuda.synchronize()

    def once(self, run: Callable[[], object], *, on_host: bool = False) -> float:
        """Seconds of one run until the device is idle again; `on_host`: until the call returns, which on a GPU is
        earlier. A CPU works in the call."""
        self.wait()
        begin = self.now()
        run()
        if not on_host:
            self.wait()
        elapsed = self.now() - begin
        self.wait()
        return elapsed

    def seconds(self, run: Callable[[], object], *, blocks: int = _NUM_BLOCKS) -> float:
        """Seconds of one run, the lower quartile of blocks of about a millisecond; fewer blocks of long runs."""
        run()
        one = max(self.once(run), 1e-7)
        times = max(1, int(_BLOCK_SECONDS / one))
        blocks = min(blocks, max(_FEWEST_BLOCKS, int(_LONG_SECONDS / one)))

        def block() -> None:
            for _ in range(times):
                run()

        return lower_quartile([self.once(block) / times for _ in range(blocks)])

    def device_seconds(self, run: Callable[[], object], *, blocks: int = _NUM_BLOCKS) -> float:
        """Seconds that one run keeps the device busy. A GPU replays runs from a graph: none waits for a launch."""
        if self.is_cpu:
            return self.seconds(run, blocks=blocks)
        run()  # libraries start outside the capture
        times = min(_MOST_IN_GRAPH, max(1, int(_BLOCK_SECONDS / max(self.once(run), 1e-7))))
        graph = torch.cuda.CUDAGraph()
        # NCCL's threads may call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                run()
        return self.seconds(graph.replay, blocks=blocks) / times

    def both_ways(
        self,
        forward: Callable[[], torch.Tensor],
        *,
        before: Callable[[], object] = lambda: None,
        times: int = 16,
        on_host: bool = False,
    ) -> tuple[float, float]:
        """Seconds of a forward, and of its backward from a gradient that is there. `before` runs untimed; `on_host`: as
        of `once`."""
        ahead: list[float] = []
        back: list[float] = []
        made: list[torch.Tensor] = []
        for attempt in range(times + 2):
            before()
            made.clear()
            forward_seconds = self.once(lambda: made.append(forward()), on_host=on_host)
            result, gradient = made[0], made[0].detach()
            backward_seconds = self.once(lambda r=result, g=gradient: r.backward(g), on_host=on_host)
            if attempt >= 2:
                ahead.append(forward_seconds)
                back.append(backward_seconds)
        return lower_quartile(ahead), lower_quartile(back)


def short_work(watch: Stopwatch) -> Callable[[], object]:
    """A computation of a fraction of a millisecond, which leaves nothing else in the nearest caches."""
    size, kind = (256, torch.float32) if watch.is_cpu else (4096, torch.bfloat16)
    a = torch.randn(size, size, device=watch.device, dtype=kind)
    return lambda: torch.mm(a, a)


def cold_copies(shape: Sequence[int], device: str, *, dtype: torch.dtype = torch.float32) -> cycle[torch.Tensor]:
    """Tensors in turn, as many as it takes until the first is in no cache any more when it comes again."""
    num_bytes = max(1, prod(shape)) * dtype.itemsize
    count = max(1, min(ceil(_cold_bytes(device) / num_bytes), _MOST_COPIES))
    return cycle([torch.randn(*shape, device=device, dtype=dtype) for _ in range(count)])


def _cold_bytes(device: str) -> int:
    """More than the caches hold."""
    if device == "cpu":
        return _COLD_BYTES
    cuda: Any = importlib.import_module("torch.cuda")
    return max(_COLD_BYTES, 2 * cuda.get_device_properties(cuda.current_device()).L2_cache_size)


def lower_quartile(values: list[float]) -> float:
    """A quarter of the values is smaller: near the best, and not one lucky draw."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
