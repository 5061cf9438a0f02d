"""A plan as tables of text: its stages, where time and memory go, its collectives, and what came second."""

from __future__ import annotations

from collections import defaultdict

from ..cost_models.units import format_bytes, format_count, format_seconds
from .plan import Alternative, Plan
from .sharding.mesh import described_shares
from .summary import counted_by, format_mesh, fullest, part_name
from .tables import Table


def stage_table(plan: Plan) -> Table:
    """What each stage holds, its memory against capacity, its time a microbatch and after the last of them.

    Where ranks hold several stages, the rank is said, and the memory of all of them behind its first one.
    """
    capacity = plan.memory_capacity_bytes
    is_several = plan.stages_per_rank > 1
    shown: set[int] = set()
    rows = []
    for index, stage in enumerate(plan.stages):
        used = f"{format_bytes(stage.total_bytes)}{_of_capacity(stage.total_bytes, capacity)}"
        if is_several:
            total = plan.memory_by_rank[stage.rank]["total"]
            used = "" if stage.rank in shown else f"{format_bytes(total)}{_of_capacity(total, capacity)}"
            shown.add(stage.rank)
        rows.append(
            (
                str(index),
                *([str(stage.rank)] if is_several else []),
                " ".join(stage.fqns) or f"units {stage.first} to {stage.last - 1}",
                format_count(stage.num_parameters),
                used,
                format_seconds(stage.forward_seconds),
                format_seconds(stage.backward_seconds),
                format_seconds(stage.step_seconds),
            )
        )
    return Table(
        title="Stages",
        columns=(
            "stage",
            *(["rank"] if is_several else []),
            "blocks",
            "parameters a GPU",
            f"memory of {format_bytes(capacity)}",
            "forward",
            "backward",
            "step end",
        ),
        rows=tuple(rows),
        num_numeric=5,
    )


def _of_capacity(size: int, capacity: int) -> str:
    return f" ({size / capacity:.0%})" if capacity else ""


def time_table(plan: Plan) -> Table:
    """Where the step goes; the parts add up to it."""
    total = plan.step_seconds
    rows = [
        (part_name(name), format_seconds(seconds), _share(seconds, total))
        for name, seconds in sorted(plan.time_breakdown_seconds.items(), key=lambda item: (-item[1], item[0]))
        if seconds
    ]
    return Table(title="Where the step goes", columns=("part", "time", "share"), rows=tuple(rows), num_numeric=2)


def _share(part: float, total: float) -> str:
    if not total:
        return "-"
    return "<1%" if 0 < part / total < 0.005 else f"{part / total:.0%}"


def memory_table(plan: Plan) -> Table:
    """Memory by component, of the stage (or the rank with several stages) that needs most."""
    index, memory = fullest(plan)
    rows = [
        (name.replace("_", " "), format_bytes(size), _share(size, memory["total"]))
        for name, size in sorted(memory.items(), key=lambda item: (-item[1], item[0]))
        if size and name != "total"
    ]
    return Table(
        title=f"Memory of {counted_by(plan)} {index}",
        columns=("component", "size", "share"),
        rows=tuple(rows),
        num_numeric=2,
    )


def communication_table(plan: Plan) -> Table:
    """Collectives a step, by axis and operation; neighbouring stages that do the same share a row."""
    found: dict[int, dict[tuple[str, str], tuple[int, int]]] = defaultdict(dict)
    for use in plan.collectives:
        count, size = found[use.stage].get((use.axis, use.op), (0, 0))
        found[use.stage][use.axis, use.op] = count + use.count, size + use.count * use.num_bytes
    rows: list[tuple[str, ...]] = []
    runs: list[tuple[int, int]] = []
    for stage in sorted(found):
        if runs and runs[-1][1] == stage - 1 and found[runs[-1][0]] == found[stage]:
            runs[-1] = runs[-1][0], stage
        else:
            runs.append((stage, stage))
    for first, last in runs:
        for (axis, op), (count, size) in sorted(found[first].items()):
            rows.append((f"{first}" if first == last else f"{first}-{last}", axis, op, str(count), format_bytes(size)))
    return Table(
        title="Collectives a step",
        columns=(counted_by(plan), "axis", "operation", "count", "payload"),
        rows=tuple(rows),
        num_numeric=2,
    )


def runner_up_table(plan: Plan) -> Table:
    """The alternatives, fastest first, with their ratio to the plan; those that do not fit last."""
    ordered = sorted(
        plan.alternatives,
        key=lambda a: (a.step_seconds is None, a.step_seconds or 0.0, a.memory_bytes, format_mesh(a.mesh)),
    )
    rows = [
        (
            format_mesh(other.mesh),
            described_shares(other.batch_shares) or str(other.microbatches),
            other.schedule if other.stages_per_rank == 1 else f"{other.schedule} x{other.stages_per_rank}",
            str(other.zero),
            other.activation_checkpoint,
            other.note,
            "-" if other.step_seconds is None else format_seconds(other.step_seconds),
            _ratio(plan, other),
            format_bytes(other.memory_bytes),
        )
        for other in ordered
    ]
    return Table(
        title="Runner-ups",
        columns=("mesh", "microbatches", "schedule", "zero", "checkpoint", "note", "step", "ratio", "memory"),
        rows=tuple(rows),
        num_numeric=3,
    )


def _ratio(plan: Plan, other: Alternative) -> str:
    if other.step_seconds is None:
        return "does not fit"
    return f"{other.step_seconds / plan.step_seconds:.2f}x" if plan.step_seconds else "-"
