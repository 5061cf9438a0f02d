"""A plan -> what a person wants to know of it: the decision, where time and memory go, and why the others lost.

Reads nothing but the plan, so it works wherever plan.json is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ..cost_models.units import format_bytes, format_count, format_seconds
from .checkpointing import described
from .errors import AutoparError
from .plan import Alternative, Plan
from .sharding.mesh import described_shares, ordered
from .tables import Table
from .zero import zero_text

_CHECKPOINT = {
    "none": "no activation checkpointing",
    "selective": "selective activation checkpointing",
    "full": "full activation checkpointing",
}

_GRADIENT_BYTES = 4  # of one parameter; gradients are kept in fp32
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
    _, memory = _fullest(after)
    used, room = memory["total"], after.memory_capacity_bytes
    steps = " -> ".join(f"{format_seconds(plan.step_seconds)}" for plan in (before, after))
    lack = ", which does not fit" if used > room else ""
    return f"{steps} a step, {format_bytes(used)} of {format_bytes(room)} on the fullest GPU{lack}"


def _format_rate(rate: float) -> str:
    """Three digits, and never an exponent where samples are many."""
    return f"{rate:.3g}" if rate < 999.5 else f"{float(f'{rate:.3g}'):,.0f}"


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
        (_part(plan, name), format_seconds(seconds), _share(seconds, total))
        for name, seconds in sorted(plan.time_breakdown_seconds.items(), key=lambda item: (-item[1], item[0]))
        if seconds
    ]
    return Table(title="Where the step goes", columns=("part", "time", "share"), rows=tuple(rows), num_numeric=2)


def _part(plan: Plan | Alternative, name: str) -> str:
    """A mesh axis stands for the communication on it that nothing hides."""
    return f"{name} communication" if name in plan.mesh else name.replace("_", " ")


def _share(part: float, total: float) -> str:
    if not total:
        return "-"
    return "<1%" if 0 < part / total < 0.005 else f"{part / total:.0%}"


def memory_table(plan: Plan) -> Table:
    """Memory by component, of the stage (or the rank with several stages) that needs most."""
    index, memory = _fullest(plan)
    rows = [
        (name.replace("_", " "), format_bytes(size), _share(size, memory["total"]))
        for name, size in sorted(memory.items(), key=lambda item: (-item[1], item[0]))
        if size and name != "total"
    ]
    return Table(
        title=f"Memory of {_where(plan)} {index}",
        columns=("component", "size", "share"),
        rows=tuple(rows),
        num_numeric=2,
    )


def _fullest(plan: Plan) -> tuple[int, Mapping[str, int]]:
    return max(enumerate(plan.memory_by_rank), key=lambda item: item[1]["total"])


def _where(plan: Plan) -> str:
    """What memory and collectives are counted by: a rank, if that is not the same as a stage."""
    return "rank" if plan.stages_per_rank > 1 else "stage"


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
        columns=(_where(plan), "axis", "operation", "count", "payload"),
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


def explanations(plan: Plan) -> tuple[str, ...]:
    """Why the plan is what it is, in plain sentences."""
    return (
        *_time_sentences(plan), *_share_sentences(plan), *_memory_sentences(plan), *_balance_sentences(plan),
        *_runner_up_sentences(plan),
    )  # fmt: skip


def _time_sentences(plan: Plan) -> tuple[str, ...]:
    parts = {name: seconds for name, seconds in plan.time_breakdown_seconds.items() if seconds > 0}
    if not parts or not plan.step_seconds:
        return ()
    name, seconds = max(sorted(parts.items()), key=lambda item: item[1])
    found = [f"The largest part of the step is {_part(plan, name)}: {seconds / plan.step_seconds:.0%}."]
    if "bubble" in parts:
        count = "one microbatch" if plan.microbatches == 1 else f"{plan.microbatches} microbatches"
        found.append(
            f"The pipeline bubble takes {parts['bubble'] / plan.step_seconds:.0%} of the step with {count}; "
            "more of them would shrink it, at the price of smaller operations."
        )
    return tuple(found)


def _share_sentences(plan: Plan) -> tuple[str, ...]:
    """Why dp ranks take different parts of the batch."""
    if not plan.batch_shares:
        return ()
    taken = f"The dp ranks take {described_shares(plan.batch_shares)} microbatches of the batch"
    paces = [max(each) for each in plan.dp_paces]
    if "batch-shares" in plan.pins or len({*paces}) < 2:
        return (f"{taken}, {'as pinned' if 'batch-shares' in plan.pins else 'so that all are done together'}.",)
    slowest, fastest = max(paces), min(paces)
    return (
        f"{taken} because they are not equally fast: for one microbatch the slowest needs {slowest / fastest:.3g} "
        "times as long as the fastest. With equal parts the fast ones would wait for it.",
    )


def _memory_sentences(plan: Plan) -> tuple[str, ...]:
    if not plan.memory_capacity_bytes:
        return ()
    index, memory = _fullest(plan)
    fraction = memory["total"] / plan.memory_capacity_bytes
    name, size = max(
        ((name, size) for name, size in sorted(memory.items()) if name != "total"),
        key=lambda item: item[1],
        default=("", 0),
    )
    what = f", {size / max(memory['total'], 1):.0%} of it {name.replace('_', ' ')}" if name else ""
    binding = "Memory nearly binds" if fraction > 0.9 else "Memory does not bind"
    if fraction > 1:
        binding = "Memory does not suffice"
    return (
        f"{binding}: {_where(plan)} {index} needs {format_bytes(memory['total'])} of "
        f"{format_bytes(plan.memory_capacity_bytes)}{what}.",
    )


def _balance_sentences(plan: Plan) -> tuple[str, ...]:
    """What data and model parallelism each would send: gradients of the parameters, or activations."""
    used = [axis for axis, size in plan.mesh.items() if size > 1]
    if not used:
        return ()
    parameters = max(stage.num_parameters for stage in plan.stages)
    gradients = parameters * _GRADIENT_BYTES
    activations = plan.microbatches * max(stage.memory_bytes.get("activations", 0) for stage in plan.stages)
    if not gradients or not activations:
        return ()
    held = f"gradients of {format_bytes(gradients)} against about {format_bytes(activations)} of activations"
    if activations > 2 * gradients:
        leans = "favours data parallelism, which sends gradients only"
    elif gradients > 2 * activations:
        leans = "favours model parallelism, which sends activations only"
    else:
        leans = "favours neither data nor model parallelism by much"
    return (f"A step of one GPU has {held}: that {leans}. The plan uses {', '.join(used)}.",)


def _runner_up_sentences(plan: Plan) -> tuple[str, ...]:
    found = []
    for other in plan.alternatives:
        name = f"{format_mesh(other.mesh)} ({other.note})" if other.note else format_mesh(other.mesh)
        if other.step_seconds is None:
            short = other.memory_bytes - plan.memory_capacity_bytes
            by = f", {format_bytes(short)} too much" if short > 0 else ""
            found.append(f"{name} does not fit: it needs {format_bytes(other.memory_bytes)}{by}{_holders(other)}.")
        elif plan.step_seconds and other.step_seconds >= plan.step_seconds:
            slower = other.step_seconds / plan.step_seconds - 1
            memory = format_bytes(other.memory_bytes)
            why = _difference(plan, other)
            found.append(f"{name} is predicted {slower:.1%} slower, with {memory} on the fullest GPU{why}.")
    return tuple(found)


def _holders(other: Alternative) -> str:
    """The two largest components of what does not fit."""
    parts = sorted(other.memory_breakdown_bytes.items(), key=lambda item: (-item[1], item[0]))[:2]
    return (
        ": " + " and ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in parts) if parts else ""
    )


def comparison(plan: Plan, other: Plan) -> str:
    """Another plan of the same step beside this one, such as one with pins.

    Raises:
        AutoparError: it is a plan of another model, batch or number of GPUs, or a step of the plan takes no time.
    """
    for name in ("gpus", "batch_size", "fingerprint"):
        if getattr(plan, name) != getattr(other, name):
            values = f"{getattr(plan, name)} and {getattr(other, name)}"
            what = {"gpus": f"numbers of GPUs: {values}", "batch_size": f"batches: {values} samples"}.get(
                name, "models"
            )
            raise AutoparError(f"the two plans are of different {what}", fix="compare plans of one step")
    if not plan.step_seconds:
        raise AutoparError("the plan says that a step takes no time", fix="plan again: it was edited by hand")
    slower = other.step_seconds / plan.step_seconds - 1
    name = decision_line(other)
    if slower >= 0:
        return f"{name}: {slower:.1%} slower{_difference(plan, other)}."
    return f"{name}: {-slower:.1%} faster; this plan spends more on{_difference(other, plan)[1:]}."


def _difference(plan: Plan | Alternative, other: Plan | Alternative) -> str:
    """Where a slower plan loses time, and where it gains some of it back."""
    if not other.time_breakdown_seconds:
        return ""
    ours, theirs = plan.time_breakdown_seconds, other.time_breakdown_seconds
    more = {name: theirs.get(name, 0.0) - ours.get(name, 0.0) for name in {*ours, *theirs}}
    ordered = sorted(more.items(), key=lambda item: (-item[1], item[0]))
    total = sum(seconds for _, seconds in ordered if seconds > 0)
    lost = [f"{_part(plan, name)} +{format_seconds(seconds)}" for name, seconds in ordered if seconds > 0.1 * total > 0]
    gained = [
        f"{_part(plan, name)} -{format_seconds(-seconds)}"
        for name, seconds in reversed(ordered)
        if seconds < -0.1 * total < 0
    ]
    return ": " + ", ".join([*lost, *gained]) if lost else ""
