"""Measures one device: matrix products, memory-bound operations, attention, and what a launch takes."""

from __future__ import annotations

import resource
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from .timing import Stopwatch, cold_copies

_CHAIN = 32
_TINY = (8, 8)
# (m, n, k): square, wide, narrow, and as few rows as a split of the batch leaves.
_CPU_SHAPES = (
    (16, 16, 16), (64, 64, 64), (16, 256, 256), (64, 128, 128), (64, 512, 512), (256, 64, 128), (256, 128, 64),
    (256, 128, 512), (256, 512, 128), (256, 256, 512), (512, 512, 16), (512, 512, 64), (1024, 64, 64),
    (1024, 128, 128), (1024, 384, 128), (1024, 128, 384), (512, 512, 512),
)  # fmt: skip
_CUDA_SHAPES = (
    (128, 128, 128), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192),
    (128, 4096, 4096), (512, 4096, 4096), (2048, 8192, 2048), (2048, 2048, 8192), (4096, 1024, 4096),
    (8192, 4096, 1024), (4096, 14336, 4096), (4096, 4096, 14336), (3000, 3000, 3000), (4096, 4096, 256),
)  # fmt: skip
_KEPT_RESULTS, _KEPT_BYTES = 16, 256 << 20
_LARGEST_SLOW_SHAPE = 1 << 24  # multiply-adds; dtypes without units of their own are slow
_STREAM_BYTES = tuple(1 << exponent for exponent in range(12, 25, 2))
_ATTENTION_KEYS = (64, 256, 1024)
_CUDA_ATTENTION_KEYS, _CUDA_ATTENTION_ROWS = (256, 1024, 4096), 1 << 18  # enough rows to hide the launch
_SUSTAINED_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """(m, k) by (k, n), averaged over the three layouts that a linear layer and its gradients use."""

    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Causal attention with `keys` keys and queries in one direction: flops as the rule of attention counts them."""

    keys: int
    flops: int
    seconds: float
    is_backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTimes:
    """Seconds of eager operations on tensors too small to matter: on the device, on the host, and in a backward."""

    device_seconds: float
    host_seconds: float
    backward_seconds: float
    view_seconds: float
    view_backward_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Capacity of one rank's device and what PyTorch takes of it before anything is allocated."""

    num_bytes: int
    overhead_bytes: int


def measure_products(device: str, dtype: str, *, is_slow: bool) -> tuple[ProductTime, ...]:
    """Products in one dtype. "tf32" is float32 on the matrix units. `is_slow`: only the smaller shapes."""
    watch = Stopwatch(device=device)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    kind = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    found: list[ProductTime] = []
    for m, n, k in _CPU_SHAPES if watch.is_cpu else _CUDA_SHAPES:
        if is_slow and m * n * k > _LARGEST_SLOW_SHAPE:
            continue
        # A step comes back to an operand after others have taken its place in the caches, and keeps what it makes.
        x, back, weight, other = (cold_copies(shape, device, dtype=kind) for shape in ((m, k), (k, m), (n, k), (k, n)))
        room = _KEPT_BYTES // (m * n * kind.itemsize)
        kept: deque[torch.Tensor] = deque(maxlen=max(1, min(_KEPT_RESULTS, room)))
        layouts: tuple[Callable[[], object], ...] = (
            lambda x=x, w=weight, kept=kept: kept.append(F.linear(next(x), next(w))),
            lambda x=x, w=other, kept=kept: kept.append(torch.mm(next(x), next(w))),
            lambda x=back, w=other, kept=kept: kept.append(torch.mm(next(x).t(), next(w))),
        )
        blocks = 4 if is_slow else 12
        seconds = sum(watch.device_seconds(run, blocks=blocks) for run in layouts) / len(layouts)
        found.append(ProductTime(m=m, n=n, k=k, seconds=seconds))
    return tuple(found)


def measure_sustained(device: str) -> float:
    """What a long run of large products keeps of a short burst's rate, at most 1."""
    watch = Stopwatch(device=device)
    size = 512 if watch.is_cpu else 8192
    kind = torch.float32 if watch.is_cpu else torch.bfloat16
    a, b = torch.randn(size, size, device=device, dtype=kind), torch.randn(size, size, device=device, dtype=kind)
    burst = watch.seconds(lambda: torch.mm(a, b), blocks=6)
    times = max(4, int(_SUSTAINED_SECONDS / burst))
    watch.wait()
    begin = watch.now()
    for _ in range(times):
        torch.mm(a, b)
    watch.wait()
    return min(1.0, burst * times / (watch.now() - begin))


def measure_streaming(device: str) -> tuple[tuple[int, float, float], ...]:
    """(bytes of a tensor, seconds forward, seconds backward) of one operation in a chain whose results are kept.

    Forward it reads and writes one such tensor, backward it reads two and writes one.
    """
    watch = Stopwatch(device=device)
    found: list[tuple[int, float, float]] = []
    for num_bytes in _STREAM_BYTES if watch.is_cpu else (*_STREAM_BYTES, 1 << 26, 1 << 28):
        x = torch.randn(num_bytes // 4, device=device, requires_grad=True)
        count = max(4, min(_CHAIN, (1 << 27) // num_bytes))

        def forward(x: torch.Tensor = x, count: int = count) -> torch.Tensor:
            for _ in range(count):
                x = torch.relu(x)
            return x

        def clear(x: torch.Tensor = x) -> None:
            x.grad = None

        ahead, back = watch.both_ways(forward, before=clear, times=8)
        found.append((num_bytes, ahead / count, back / count))
    return tuple(found)


def measure_transcendental(device: str) -> float:
    """Seconds of one exponential beyond reading and writing it."""
    watch = Stopwatch(device=device)
    x = torch.randn(1 << 16 if watch.is_cpu else 1 << 24, device=device)
    functions = (torch.exp, F.silu, F.gelu, torch.tanh)
    return sum(watch.seconds(lambda f=f: f(x)) for f in functions) / len(functions) / x.numel()


def measure_attention(device: str) -> tuple[AttentionTime, ...]:
    """Fused causal attention by the number of keys, forward and backward."""
    watch = Stopwatch(device=device)
    kind = torch.float32 if watch.is_cpu else torch.bfloat16
    found: list[AttentionTime] = []
    for keys in _ATTENTION_KEYS if watch.is_cpu else _CUDA_ATTENTION_KEYS:
        heads, head_dim = (max(4, 2048 // keys), 32) if watch.is_cpu else (_CUDA_ATTENTION_ROWS // keys, 128)
        query, key, value = (
            torch.randn(1, heads, keys, head_dim, device=device, dtype=kind, requires_grad=True) for _ in range(3)
        )

        def forward(q: torch.Tensor = query, k: torch.Tensor = key, v: torch.Tensor = value) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def clear(tensors: tuple[torch.Tensor, ...] = (query, key, value)) -> None:
            for tensor in tensors:
                tensor.grad = None

        ahead, back = watch.both_ways(forward, before=clear, times=8)
        flops = 2 * heads * (keys * keys - keys * keys // 2) * 2 * head_dim
        found.append(AttentionTime(keys=keys, flops=flops, seconds=ahead, is_backward=False))
        found.append(AttentionTime(keys=keys, flops=int(2.5 * flops), seconds=back, is_backward=True))
    return tuple(found)


def measure_launches(device: str) -> LaunchTimes:
    """Eager operations with autograd on tiny tensors."""
    watch = Stopwatch(device=device)
    x = torch.randn(_TINY, device=device, requires_grad=True)
    weight = torch.randn(_TINY, device=device)
    bias = torch.randn(_TINY[1:], device=device)

    def clear() -> None:
        x.grad = None

    def chain(make: Callable[[torch.Tensor], torch.Tensor]) -> tuple[float, float]:
        def forward() -> torch.Tensor:
            y = x
            for _ in range(_CHAIN):
                y = make(y)
            return y[0, 0]

        ahead, back = watch.both_ways(forward, before=clear, on_host=True)
        return ahead / _CHAIN, back / _CHAIN

    operations = [
        chain(torch.relu),
        chain(lambda y: y * weight),
        chain(lambda y: y + weight),
        chain(lambda y: F.layer_norm(y, _TINY[1:], bias, bias)),
    ]
    views = [chain(lambda y: y.transpose(0, 1)), chain(lambda y: y.view(_TINY[1], _TINY[0]))]
    host = sum(ahead for ahead, _ in operations) / len(operations)
    return LaunchTimes(
        device_seconds=host if watch.is_cpu else watch.device_seconds(lambda: weight + 1.0),
        host_seconds=host,
        backward_seconds=sum(back for _, back in operations) / len(operations),
        view_seconds=sum(ahead for ahead, _ in views) / len(views),
        view_backward_seconds=sum(back for _, back in views) / len(views),
    )


def measure_memory(device: str, ranks: int) -> Memory:
    """Of one rank; on a CPU its share of the machine's."""
    if device == "cpu":
        import os

        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Memory(num_bytes=whole // ranks, overhead_bytes=resident)
    # Context, libraries and the buffers of messages are there before the first tensor.
    work = torch.ones(_TINY, device=device)
    work = work @ work
    if ranks > 1:
        dist.all_reduce(work)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, whole = torch.cuda.mem_get_info()
    return Memory(num_bytes=whole, overhead_bytes=max(0, whole - free - torch.cuda.memory_reserved()))
