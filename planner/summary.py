"""A plan in lines: what was decided, for what, how fast, and how good the answer is."""

from __future__ import annotations

from collections.abc import Mapping

from ..cost_models.units import format_bytes, format_seconds
from .checkpointing import described
from .plan import Plan
from .sharding.mesh import AXES, described_shares, ordered
from .zero import zero_text

_CHECKPOINT = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "full": "full activation checkpointing",
}

REPRICED = "priced again"  # status of a plan that changed since the search, whose bound says nothing of it
_STATUS = {"optimal": "proven optimal", "within gap": "search complete", "time limit": "stopped at the time limit"}


def format_mesh(mesh: Mapping[str, int]) -> str:
    """ "pp=2 dp=2 tp=2", axes of size 1 left out; "1 GPU" where all are."""
    return " ".join(f"{axis}={size}" for axis, size in ordered(mesh).items() if size > 1) or "1 GPU"


def decision_line(plan: Plan) -> str:
    """The whole decision in one line."""
    parts = [format_mesh(plan.mesh)]
    samples = plan.batch_size // (plan.microbatches * plan.mesh.get("dp", 1))
    unit = "sample" if samples == 1 else "samples"
    if plan.batch_shares:
        parts.append(f"{described_shares(plan.batch_shares)} microbatches of {samples} {unit} by dp rank")
    elif plan.microbatches > 1:
        parts.append(f"{plan.microbatches} microbatches of {samples} {unit}")
    else:
        parts.append(f"one microbatch of {samples} {unit}")
    if plan.schedule != "none":
        several = f" with {plan.stages_per_rank} stages per rank" if plan.stages_per_rank > 1 else ""
        parts.append(f"schedule {plan.schedule}{several}")
    if plan.mesh.get("dp", 1) * plan.mesh.get("cp", 1) > 1:
        within = f" within groups of {plan.zero_shard_size}" if plan.zero_shard_size else ""
        parts.append(f"ZeRO-{zero_text(plan.zero, plan.zero_by_block)}{within}")
    parts.append(described(plan.checkpoint_by_block) or _CHECKPOINT[plan.activation_checkpoint])
    return ", ".join(parts)


def setting_line(plan: Plan) -> str:
    """What the plan is for."""
    facts = "".join(f", {name}={value:g}" for name, value in sorted(plan.cluster_overrides.items()))
    return (
        f"{plan.gpus} GPUs of {plan.cluster}{facts}, {plan.batch_size} samples a step, "
        f"{plan.precision}, {plan.optimizer}, stack {plan.stack}"
    )


def prediction_line(plan: Plan) -> str:
    rate = f", {_format_rate(plan.batch_size / plan.step_seconds)} samples/s" if plan.step_seconds else ""
    return f"{format_seconds(plan.step_seconds)} a step{rate}"


def repriced_line(before: Plan, after: Plan) -> str:
    """What pricing again has changed, and whether the plan still fits."""
    _, memory = fullest(after)
    used, room = memory["total"], after.memory_capacity_bytes
    steps = " -> ".join(f"{format_seconds(plan.step_seconds)}" for plan in (before, after))
    lack = ", which does not fit" if used > room else ""
    return f"{steps} a step, {format_bytes(used)} of {format_bytes(room)} on the fullest GPU{lack}"


def _format_rate(rate: float) -> str:
    """Three digits, and never an exponent where samples are many."""
    return f"{rate:.3g}" if rate < 999.5 else f"{float(f'{rate:.3g}'):,.0f}"


def solver_line(plan: Plan) -> str:
    """How good the answer is, and how it was found."""
    solver = plan.solver
    if solver.status == REPRICED:
        return "priced again since the search: it was edited, or autopar has changed; how near to the best is not known"
    way = "jointly" if solver.exact else "axis by axis"
    programs = "1 program" if solver.solved == 1 else f"{solver.solved} programs"
    return (
        f"{solver.solver}, {_STATUS.get(solver.status, solver.status)}; no plan is faster than "
        f"{format_seconds(solver.bound_seconds)}, a gap of {solver.gap_fraction:.1%}; {solver.candidates} candidates, "
        f"{programs} solved {way}"
    )


def part_name(name: str) -> str:
    """A mesh axis stands for the communication on it that nothing hides."""
    return f"{name} communication" if name in AXES else name.replace("_", " ")


def fullest(plan: Plan) -> tuple[int, Mapping[str, int]]:
    return max(enumerate(plan.memory_by_rank), key=lambda item: item[1]["total"])


def counted_by(plan: Plan) -> str:
    """What memory and collectives are counted by: a rank, if that is not the same as a stage."""
    return "rank" if plan.stages_per_rank > 1 else "stage"
