"""Measures PyTorch's own machinery: DTensor parameters, optimizers, clipping, checkpointing, FSDP2, pipelines.

What is measured is what emitted code does, on tensors so small that kernels and messages hardly count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from ..runtime.collectives import own_gradient
from .timing import Stopwatch, short_work

_TINY = (8, 8)
_NUM_TENSORS = 16
_LARGE_ELEMENTS, _CUDA_LARGE_ELEMENTS = 1 << 18, 1 << 24  # beyond what a launch takes
_NUM_GROUPS = 4
_MICROBATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Seconds per plain tensor and per DTensor, and per byte of a parameter."""

    tensor_seconds: float
    sharded_tensor_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machinery:
    """Pairs are (forward, backward) seconds."""

    updates: dict[str, Update]
    parameter: tuple[float, float]
    conversion: tuple[float, float]
    checkpoint_seconds: float
    fsdp_group: tuple[float, float]
    fsdp_parameter: tuple[float, float]
    action_seconds: float


def measure_machinery(device: str, ranks: int) -> Machinery:
    """Every rank takes part; parts that need several are 0 on one."""
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("ranks",))
    watch = Stopwatch(device=device)
    group, parameter = _fsdp(watch, mesh) if ranks > 1 else ((0.0, 0.0), (0.0, 0.0))
    return Machinery(
        updates={name: _update(watch, mesh, name) for name in ("adamw", "sgd", "clip")},
        parameter=_parameter(watch, mesh),
        conversion=_conversion(watch),
        checkpoint_seconds=_checkpoint(watch),
        fsdp_group=group,
        fsdp_parameter=parameter,
        action_seconds=_action(watch, mesh) if ranks > 1 else 0.0,
    )


def _parameters(device: str, count: int, mesh: DeviceMesh | None = None, shape: Sequence[int] = _TINY) -> list:
    tensors = [torch.randn(*shape, device=device) for _ in range(count)]
    if mesh is not None:
        tensors = [DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in tensors]
    found = [nn.Parameter(tensor) for tensor in tensors]
    for parameter in found:
        parameter.grad = torch.zeros_like(parameter)
    return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _clip(parameters: Sequence[nn.Parameter]) -> None:
    """As the emitted clip_gradients, without its all_reduce."""
    total = torch.zeros((), device=parameters[0].device)
    for p in parameters:
        assert p.grad is not None
        copies = 2 if isinstance(p, DTensor) and p.placements[-1].is_replicate() else 1
        total += torch.linalg.vector_norm(_local(p.grad), dtype=total.dtype) ** 2 / copies
    scale = (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0)
    for p in parameters:
        assert p.grad is not None
        _local(p.grad).mul_(scale)


def _update(watch: Stopwatch, mesh: DeviceMesh, name: str) -> Update:
    def seconds(parameters: list[nn.Parameter]) -> float:
        if name == "clip":
            return watch.seconds(lambda: _clip(parameters), blocks=8)
        if name == "adamw":
            return watch.seconds(torch.optim.AdamW([{"params": parameters}], lr=1e-4).step, blocks=8)
        return watch.seconds(torch.optim.SGD([{"params": parameters}], lr=1e-4).step, blocks=8)

    plain = seconds(_parameters(watch.device, _NUM_TENSORS)) / _NUM_TENSORS
    sharded = seconds(_parameters(watch.device, _NUM_TENSORS, mesh)) / _NUM_TENSORS
    count, elements = 4, _LARGE_ELEMENTS if watch.is_cpu else _CUDA_LARGE_ELEMENTS
    large = seconds(_parameters(watch.device, count, shape=(elements,)))
    return Update(
        tensor_seconds=plain,
        sharded_tensor_seconds=sharded,
        seconds_per_byte=max(large / count - plain, 1e-9) / (4 * elements),
    )


def _parameter(watch: Stopwatch, mesh: DeviceMesh) -> tuple[float, float]:
    """Reading a DTensor's local part; its first gradient and one that is added to it count alike."""
    parameters = _parameters(watch.device, _NUM_TENSORS, mesh)
    plain = [nn.Parameter(torch.randn(_TINY, device=watch.device)) for _ in range(_NUM_TENSORS)]

    def pair(tensors: Sequence[torch.Tensor], *, clears: bool) -> tuple[float, float]:
        def before() -> None:
            if clears:
                for tensor in tensors:
                    tensor.grad = None

        return watch.both_ways(
            lambda: torch.stack([_local(t) for t in tensors]).sum(), before=before, times=8, on_host=True
        )

    found = [pair(parameters, clears=clears) for clears in (True, False)]
    base = pair(plain, clears=False)
    ahead, back = (max(0.0, (sum(times[i] for times in found) / 2 - base[i]) / _NUM_TENSORS) for i in (0, 1))
    return ahead, back


def _conversion(watch: Stopwatch) -> tuple[float, float]:
    x = torch.randn(_TINY, device=watch.device, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for _ in range(_NUM_TENSORS):
            y = own_gradient(y)
        return y[0, 0]

    ahead, back = watch.both_ways(forward, on_host=True)
    return ahead / _NUM_TENSORS, back / _NUM_TENSORS


def _checkpoint(watch: Stopwatch) -> float:
    """What running a block again takes beside the block."""
    x = torch.randn(_TINY, device=watch.device, requires_grad=True)

    def block(y: torch.Tensor) -> torch.Tensor:
        return y * 2.0

    def run(step: Callable[[torch.Tensor], torch.Tensor]) -> float:
        def forward() -> torch.Tensor:
            y = x
            for _ in range(_NUM_TENSORS):
                y = step(y)
            return y[0, 0]

        return sum(watch.both_ways(forward, on_host=True)) / _NUM_TENSORS

    again = run(lambda y: checkpoint(block, y, use_reentrant=False, preserve_rng_state=False))
    with torch.no_grad():
        alone = watch.seconds(lambda: block(x))
    return max(0.0, again - run(block) - alone)


class _Scale(nn.Module):
    """Multiplies by each of its parameters."""

    def __init__(self, count: int, device: str):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(_TINY, device=device) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def _fsdp(watch: Stopwatch, mesh: DeviceMesh) -> tuple[tuple[float, float], tuple[float, float]]:
    """((forward, backward) of a group, of each parameter), from groups of one and of several parameters."""

    def pair(count: int, *, shards: bool) -> tuple[float, float]:
        blocks = [_Scale(count, watch.device) for _ in range(_NUM_GROUPS)]
        model = nn.Sequential(*blocks)
        if shards:
            for block in blocks:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        x = torch.ones(_TINY, device=watch.device)

        def clear() -> None:
            for parameter in model.parameters():
                parameter.grad = None

        ahead, back = watch.both_ways(lambda: model(x).sum(), before=clear, times=10, on_host=True)
        return ahead / _NUM_GROUPS, back / _NUM_GROUPS

    few, many = 1, 5
    extra: list[tuple[float, float]] = []
    for count in (few, many):
        with_hooks, without = pair(count, shards=True), pair(count, shards=False)
        extra.append((max(0.0, with_hooks[0] - without[0]), max(0.0, with_hooks[1] - without[1])))
    each = tuple(max(0.0, (extra[1][i] - extra[0][i]) / (many - few)) for i in (0, 1))
    group = tuple(max(0.0, extra[0][i] - few * each[i]) for i in (0, 1))
    return (group[0], group[1]), (each[0], each[1])


class _Work(torch.autograd.Function):
    """The identity, which works for a while in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], object]) -> torch.Tensor:
        ctx.work = work
        work()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.work()
        return *grads, None


def _action(watch: Stopwatch, mesh: DeviceMesh) -> float:
    """Seconds that a pipeline schedule takes for one forward or backward, beside the stage's own.

    A stage works between its messages, as real ones do: what the schedule needs is not in the caches any more.
    """
    index, ranks = mesh.get_local_rank(), mesh.size()
    device = torch.device(watch.device, torch.cuda.current_device()) if watch.device == "cuda" else torch.device("cpu")
    layer = nn.Linear(_TINY[1], _TINY[1], device=device)
    meta = torch.empty(_TINY, device="meta", requires_grad=True)
    is_last = index == ranks - 1
    work = short_work(watch)

    def run(x: torch.Tensor) -> torch.Tensor:
        return _Work.apply(layer(x), work)

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor, microbatch: torch.Tensor | None = None) -> torch.Tensor:
            y = run(x)
            return y.sum() if is_last else y

    stage = PipelineStage(
        Stage(),
        index,
        ranks,
        device,
        input_args=(meta,),
        output_args=(torch.empty((), device="meta", requires_grad=True) if is_last else meta,),
        group=mesh.get_group(),
    )
    schedule = Schedule1F1B(stage, _MICROBATCHES, loss_fn=lambda loss, _: loss, scale_grads=False)
    numbers = torch.arange(_MICROBATCHES)
    whole = torch.ones(_MICROBATCHES * _TINY[0], _TINY[1], device=device)

    def step() -> None:
        layer.zero_grad()
        arguments = (whole,) if index == 0 else ()
        if is_last:
            schedule.step(*arguments, microbatch=numbers, target=numbers, losses=[], return_outputs=False)
        else:
            schedule.step(*arguments, microbatch=numbers, return_outputs=False)

    x = torch.ones(_TINY, device=device, requires_grad=True)

    def alone() -> None:
        for _ in range(_MICROBATCHES):
            run(x).sum().backward()

    def seconds(piece: Callable[[], None]) -> float:
        dist.barrier()
        # On a GPU the call returns before its messages have come: what is left is the host's part.
        return watch.once(piece, on_host=True)

    # In turns, so that a slow spell of the machine meets both.
    extra = [seconds(step) - seconds(alone) for _ in range(18)][2:]
    return max(0.0, statistics.median(extra) / (2 * _MICROBATCHES))
