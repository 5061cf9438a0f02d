"""What an optimizer keeps and how long its step takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import AutoparError
from .hardware import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer, as PyTorch's multi-tensor ("foreach") form runs it.

    states: tensors kept per parameter, of its size and dtype. passes: how often a tensor of that size is read or
    written in a step, clipping by the global norm included.
    """

    name: str
    states: int
    passes: int


# AdamW reads p, g, m, v and writes p, m, v: 7. SGD reads p, g and writes p: 3. The gradient norm reads every gradient,
# scaling by it reads and writes it: 3 more.
# Source: the update rules; published AdamW steps take 28 to 40 bytes per fp32 parameter, which is 7 to 10 passes.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(name="adamw", states=2, passes=10),
    "sgd": Optimizer(name="sgd", states=0, passes=6),
}

# Host work per parameter of clip, AdamW's step (foreach) and zeroing, in launches of an eager kernel: a DTensor's, and
# a plain tensor's. Source: measured, torch 2.13, CPU: 150 to 220 us and 40 to 80 us a tensor of 4 elements, where an
# eager kernel with its backward takes 10 us.
_HOST_LAUNCHES_PER_DTENSOR, _HOST_LAUNCHES_PER_TENSOR = 16, 6


def get_optimizer(name: str) -> Optimizer:
    """The optimizer of this name.

    Raises:
        AutoparError: there is none; the valid names are listed.
    """
    if name not in OPTIMIZERS:
        raise AutoparError(f"there is no optimizer {name!r}", fix=f"choose one of: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def optimizer_seconds(
    parameter_bytes: int, gpu: Gpu, *, optimizer: str, num_tensors: int = 0, sharded: bool = False
) -> float:
    """Clipping and the optimizer's step over the `parameter_bytes` that this rank updates, without collectives.

    `sharded`: the parameters are DTensors. Measured costs of the device are used where it has them.

    Raises:
        AutoparError: unknown optimizer.
    """
    measured = [gpu.updates[name] for name in (optimizer, "clip") if name in gpu.updates]
    if len(measured) == 2:
        return sum(costs.seconds(parameter_bytes, num_tensors=num_tensors, sharded=sharded) for costs in measured)
    traffic = get_optimizer(optimizer).passes * parameter_bytes
    device = traffic / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
    launches = _HOST_LAUNCHES_PER_DTENSOR if sharded else _HOST_LAUNCHES_PER_TENSOR
    return max(device, num_tensors * launches * gpu.launch_seconds)
