"""What a plan says beside placements, and what it predicts: the policies that the emitted code follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ....planner.errors import AutoparError
from ....planner.plan import Plan
from ....planner.schedules import get_schedule, schedule_names

ZERO_STAGES = (0, 1, 2, 3)
CHECKPOINTS = ("none", "selective", "full")


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
            ("schedule", self.schedule, schedule_names()),
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
        AutoparError: as `Options`, or a schedule that cannot run with these stages and microbatches.
    """
    options = Options(
        zero=plan.zero,
        activation_checkpoint=plan.activation_checkpoint,
        schedule=plan.schedule,
        stage_seconds=tuple(stage.forward_seconds + stage.backward_seconds for stage in plan.stages),
        step_seconds=dict(plan.time_breakdown_seconds),
    )
    reason = get_schedule(plan.schedule).refuse(len(plan.stages), plan.microbatches)
    if reason:
        raise AutoparError(
            f"schedule {plan.schedule} cannot run: {reason}",
            where="plan.json: schedule, stages, microbatches",
            fix="choose another schedule or number of microbatches",
        )
    return options


__all__ = ["Options", "options_of"]
