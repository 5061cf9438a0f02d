"""What a plan says beside placements, and what it predicts: the policies that the emitted code follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....planner.errors import AutoparError
from ....planner.plan import Plan

ZERO_STAGES = (0, 2, 3)
CHECKPOINTS = ("none", "full")
SCHEDULES = ("none", "gpipe", "1f1b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`stage_seconds`: predicted forward and backward of one microbatch, by stage; `step_seconds`: parts of a step.

    Raises:
        AutoparError: a policy that no code can be written for.
    """

    zero: int
    activation_checkpoint: str
    schedule: str
    stage_seconds: tuple[float, ...] = ()
    step_seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("zero", self.zero, ZERO_STAGES),
            ("activation_checkpoint", self.activation_checkpoint, CHECKPOINTS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise AutoparError(
                    f"no code can be written for {name}={value}",
                    where=f"plan.json: {name}",
                    fix=f"choose one of {', '.join(map(str, known))}",
                )


def options_of(plan: Plan) -> Options:
    """The options of a plan.

    Raises:
        AutoparError: as `Options`.
    """
    return Options(
        zero=plan.zero,
        activation_checkpoint=plan.activation_checkpoint,
        schedule=plan.schedule,
        stage_seconds=tuple(stage.forward_seconds + stage.backward_seconds for stage in plan.stages),
        step_seconds=dict(plan.time_breakdown_seconds),
    )


__all__ = ["Options", "options_of"]
