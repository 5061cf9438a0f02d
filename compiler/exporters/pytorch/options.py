"""What a plan says beside placements, and what it predicts: the policies that the emitted code follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ....planner.checkpointing import MIXED, POLICIES
from ....planner.errors import AutoparError
from ....planner.plan import Plan
from ....planner.schedules import get_schedule, schedule_names
from ....planner.zero import ZERO_STAGES

CHECKPOINTS = (*POLICIES, MIXED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """`rank_stages`: the stages of each pipeline rank. `stage_seconds`: predicted forward and backward of one
    microbatch, by stage; `step_seconds`: parts of a step.

    Raises:
        AutoparError: a policy that no code can be written for.
    """

    zero: int
    activation_checkpoint: str
    schedule: str
    rank_stages: tuple[tuple[int, ...], ...] = ((0,),)
    stage_seconds: tuple[float, ...] = ()
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    checkpoint_by_block: Mapping[str, str] = field(default_factory=dict)  # as in the plan
    zero_by_block: Mapping[str, int] = field(default_factory=dict)

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
        zero_by_block=dict(plan.zero_by_block),
        activation_checkpoint=plan.activation_checkpoint,
        checkpoint_by_block=dict(plan.checkpoint_by_block),
        schedule=plan.schedule,
        stage_seconds=tuple(stage.forward_seconds + stage.backward_seconds for stage in plan.stages),
        step_seconds=dict(plan.time_breakdown_seconds),
    )
    ranks, schedule = plan.mesh["pp"], get_schedule(plan.schedule)
    counts = sorted({*(plan.batch_shares or (plan.microbatches,))})
    reason = next(filter(None, (schedule.refuse(ranks, plan.stages_per_rank, count) for count in counts)), "")
    if reason:
        raise AutoparError(
            f"schedule {plan.schedule} cannot run: {reason}",
            where="plan.json: schedule, stages, microbatches, batch_shares",
            fix="choose another schedule or number of microbatches",
        )
    for index, stage in enumerate(plan.stages):
        if (rank := schedule.rank_of(index, ranks)) != stage.rank:
            raise AutoparError(
                f"stage {index} is on rank {stage.rank}, but schedule {plan.schedule} has it on {rank}",
                where=f"plan.json: stages[{index}].rank",
                fix=f"write {rank}",
            )
    held = (schedule.stages_of(rank, ranks, len(plan.stages)) for rank in range(ranks))
    return replace(options, rank_stages=tuple(held))


__all__ = ["Options", "options_of"]
