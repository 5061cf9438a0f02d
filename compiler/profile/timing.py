"""Seconds of short pieces of work, on a machine that others may be using too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import prod

import torch

_BLOCK_SECONDS = 1e-3
_NUM_BLOCKS = 24
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

    def seconds(self, run: Callable[[], object], *, blocks: int = _NUM_BLOCKS) -> float:
        """Seconds of one run, the lower quartile of blocks of about a millisecond."""
        run()
        begin = self.now()
        run()
        self.wait()
        times = max(1, int(_BLOCK_SECONDS / max(self.now() - begin, 1e-7)))
        found: list[float] = []
        for _ in range(blocks):
            self.wait()
            begin = self.now()
            for _ in range(times):
                run()
            self.wait()
            found.append((self.now() - begin) / times)
        return lower_quartile(found)

    def both_ways(
        self, forward: Callable[[], torch.Tensor], *, before: Callable[[], object] = lambda: None, times: int = 16
    ) -> tuple[float, float]:
        """Seconds of a forward that returns a scalar, and of its backward. `before` runs untimed."""
        ahead: list[float] = []
        back: list[float] = []
        for attempt in range(times + 2):
            before()
            self.wait()
            begin = self.now()
            loss = forward()
            self.wait()
            middle = self.now()
            loss.backward()
            self.wait()
            if attempt >= 2:
                ahead.append(middle - begin)
                back.append(self.now() - middle)
        return lower_quartile(ahead), lower_quartile(back)


def short_work(watch: Stopwatch) -> Callable[[], object]:
    """A computation of a fraction of a millisecond, which leaves nothing else in the nearest caches."""
    size = 256 if watch.is_cpu else 4096
    a = torch.randn(size, size, device=watch.device)
    return lambda: torch.mm(a, a)


def cold_copies(shape: Sequence[int], device: str, *, dtype: torch.dtype = torch.float32) -> cycle[torch.Tensor]:
    """Tensors in turn, as many as it takes until the first is in no cache any more when it comes again."""
    num_bytes = max(1, prod(shape)) * dtype.itemsize
    count = max(1, min(_COLD_BYTES // num_bytes, _MOST_COPIES))
    return cycle([torch.randn(*shape, device=device, dtype=dtype) for _ in range(count)])


def lower_quartile(values: list[float]) -> float:
    """A quarter of the values is smaller: near the best, and not one lucky draw."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]
