"""What one pipeline stage takes: seconds of a microbatch and of a step, and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ...cost_models.memory import Memory
from ..schedules import Alive
from .unit_costs import Seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCost:
    """One stage: a microbatch, and what runs once a step.

    `weights`: the part of `backward` that only weights need. `host_forward`, `host_backward`: the host's part of both,
    without what the schedule takes.
    """

    forward: Seconds
    backward: Seconds
    weights: Seconds
    step: Mapping[str, float]  # once a step: compute of the prelude, each axis, optimizer
    send_seconds: float  # to the next stage, one microbatch
    memory_bytes: Mapping[str, int]
    num_parameters: int
    host_forward: float
    host_backward: float
    action_seconds: Mapping[str, float] = field(default_factory=dict)  # by kind, as simulated

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    def slowed(self, factor: float) -> StageCost:
        """The same on ranks that take `factor` times as long."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            weights=self.weights * factor,
            step={name: seconds * factor for name, seconds in self.step.items()},
            host_forward=self.host_forward * factor,
            host_backward=self.host_backward * factor,
        )

    @property
    def busy_seconds(self) -> float:
        """Of one microbatch."""
        return self.forward.total + self.backward.total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedStage:
    """A stage wherever it lies: `cost` without memory and messages, `still` without activations, which one microbatch
    takes `saved_bytes` for; `remade_bytes` from when what was not kept has been made again."""

    cost: StageCost
    still: Memory
    saved_bytes: int
    remade_bytes: int

    def activation_bytes(self, alive: Alive) -> int:
        """What autograd keeps of so many microbatches."""
        return alive.untouched * self.saved_bytes + alive.halfway * self.remade_bytes


class UnitSeconds(NamedTuple):
    """By unit, without the prelude: both directions of one microbatch, and the forward."""

    through: tuple[float, ...]
    forward: tuple[float, ...]


class UnitSizes(NamedTuple):
    """By unit, without the prelude: bytes kept of one microbatch before and after it has run again; the most bytes that
    one works with."""

    kept: tuple[float, ...]
    remade: tuple[float, ...]
    working_bytes: int
