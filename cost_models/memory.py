"""Bytes -> peak bytes on one rank, by component.

Parameters are stored in the module's dtype (float32). Under `bf16` or `fp16` they are the masters: FSDP2 mixed
precision gathers them in the compute dtype, ZeRO-0 and ZeRO-1 keep a copy in it; gradients and optimizer state stay in
the stored dtype.

| | stored parameters | gradients | optimizer | copies in compute dtype |
|---|---|---|---|---|
| ZeRO-0 | whole | whole | whole | whole, if the dtype differs |
| ZeRO-1 | whole | whole | split | whole, if the dtype differs |
| ZeRO-2 | split | split | split | whole: not resharded between forward and backward |
| ZeRO-3 | split | split | split | of the unit that runs, the one fetched ahead, and what is outside |

ZeRO-2 and 3 also hold one unit's whole gradient while it is reduced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from operator import add

from .hardware import Gpu
from .optimizer import get_optimizer

COMPUTE_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
_STORED_BYTES = 4

# The caching allocator cannot reuse every hole of the blocks that come and go.
# Source: unverified; published torch-allocator peaks are met without, nvidia-smi shows 10 to 20% more.
FRAGMENTATION_FRACTION = 0.03

_ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Peak bytes of one rank by component. Records add up.

    parameters: copies that stay for the whole step. master_weights: float32 parameters beside copies in another dtype.
    gather_buffers: parameters gathered and gradients reduced in flight. temporary: largest scratch of one operation.
    overhead: context, libraries, allocator.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    master_weights: int = 0
    activations: int = 0
    gather_buffers: int = 0
    temporary: int = 0
    overhead: int = 0

    def __post_init__(self) -> None:
        if min(self._sizes) < 0:
            name = next(name for name, size in zip(self.__slots__, self._sizes, strict=True) if size < 0)
            raise ValueError(f"{name} is negative")

    @property
    def _sizes(self) -> tuple[int, ...]:
        """In the order of the fields."""
        return (
            self.parameters, self.gradients, self.optimizer, self.master_weights, self.activations, self.gather_buffers,
            self.temporary, self.overhead,
        )  # fmt: skip

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes)

    def __add__(self, other: Memory) -> Memory:
        sizes = map(add, self._sizes, other._sizes)
        return Memory(**dict(zip(self.__slots__, sizes, strict=True)))

    @staticmethod
    def zero() -> Memory:
        return Memory()

    def by_component(self) -> dict[str, int]:
        """Component -> bytes, and "total" last."""
        return {**dict(zip(self.__slots__, self._sizes, strict=True)), "total": self.total_bytes}


def state_bytes(
    parameter_bytes: int,
    *,
    zero: int,
    dp: int,
    optimizer: str,
    precision: str,
    largest_unit_bytes: int | None = None,
    kept_bytes: int = 0,
    largest_freed_bytes: int | None = None,
    frozen_bytes: int = 0,
    shard_bytes: int | None = None,
) -> Memory:
    """Parameters, gradients, optimizer state and gather buffers of one rank.

    `parameter_bytes` are trained parameters as stored (float32), after tp and pp and before dp has split anything;
    `frozen_bytes` other parameters and buffers, held whole. `largest_unit_bytes`: stored bytes of the largest unit that
    FSDP gathers at once (default: all of them). `kept_bytes`: those that stay gathered though `zero` is 3, of units
    under ZeRO-2 and of what lies outside units; `largest_freed_bytes`: those of the largest other unit. `shard_bytes`:
    the largest part of the trained parameters that dp leaves (default: an even one).

    Raises:
        ValueError: a ZeRO stage or precision that does not exist.
        AutoparError: unknown optimizer.
    """
    if zero not in _ZERO_STAGES:
        raise ValueError(f"zero is {zero}, not one of {_ZERO_STAGES}")
    if precision not in COMPUTE_BYTES:
        raise ValueError(f"precision is {precision!r}, not one of {tuple(COMPUTE_BYTES)}")
    is_mixed = COMPUTE_BYTES[precision] < _STORED_BYTES
    states = get_optimizer(optimizer).states
    unit = min(parameter_bytes, parameter_bytes if largest_unit_bytes is None else largest_unit_bytes)

    def computed(num_bytes: int) -> int:
        return num_bytes * COMPUTE_BYTES[precision] // _STORED_BYTES

    part = ceil(parameter_bytes / dp) if shard_bytes is None else shard_bytes
    is_split = zero >= 2 and dp > 1
    stored = part if is_split else parameter_bytes
    copies, gathered = (computed(parameter_bytes) if is_mixed else 0), 0
    if is_split:
        copies = 0
        kept = parameter_bytes if zero == 2 else kept_bytes
        freed = unit if largest_freed_bytes is None else largest_freed_bytes
        whole_copies = computed(kept) + min(computed(parameter_bytes - kept), 2 * computed(freed))
        # The unit's gradient in the compute dtype, and in float32 as reduce_scatter reads it where that differs.
        gathered = whole_copies + computed(unit) + (unit if is_mixed else 0)
    return Memory(
        parameters=(copies if is_mixed else stored) + frozen_bytes,
        master_weights=stored if is_mixed else 0,
        gradients=stored,
        optimizer=states * (part if zero >= 1 else parameter_bytes),
        gather_buffers=gathered,
    )


def activation_bytes(
    saved_bytes: Sequence[int],
    *,
    in_flight: int,
    input_bytes: Sequence[int] | None = None,
    is_checkpointed: Sequence[bool] | None = None,
) -> Memory:
    """Activations of a stage, by unit: what autograd keeps of one microbatch, times the microbatches in flight.

    A checkpointed unit keeps only its inputs; when its backward comes, its saved tensors are made again, one unit at a
    time.
    """
    checkpointed = [False] * len(saved_bytes) if is_checkpointed is None else is_checkpointed
    inputs = [0] * len(saved_bytes) if input_bytes is None else input_bytes
    kept = recomputed = 0
    for saved, kept_input, is_recomputed in zip(saved_bytes, inputs, checkpointed, strict=True):
        kept += min(saved, kept_input) if is_recomputed else saved
        recomputed = max(recomputed, saved - min(saved, kept_input) if is_recomputed else 0)
    return Memory(activations=kept * in_flight + recomputed)


def overhead_bytes(memory: Memory, gpu: Gpu) -> Memory:
    """What context, libraries and the allocator take beside `memory`."""
    moving = memory.activations + memory.gather_buffers + memory.temporary
    return Memory(overhead=gpu.overhead_bytes + int(moving * FRAGMENTATION_FRACTION))


def fits(memory: Memory, gpu: Gpu) -> bool:
    """Whether a rank's peak, overhead included, is within the device's capacity."""
    return memory.total_bytes <= gpu.hbm_bytes
