"""A plan -> why it is what it is, and why others are not, in plain sentences.

Reads nothing but the plan, so it works wherever plan.json is.
"""

from __future__ import annotations

from ..cost_models.units import format_bytes, format_seconds
from .errors import AutoparError
from .plan import Alternative, Plan
from .sharding.mesh import described_shares
from .summary import counted_by, decision_line, format_mesh, fullest, part_name

_GRADIENT_BYTES = 4  # of one parameter; gradients are kept in fp32


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
    found = [f"The largest part of the step is {part_name(name)}: {seconds / plan.step_seconds:.0%}."]
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
    index, memory = fullest(plan)
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
        f"{binding}: {counted_by(plan)} {index} needs {format_bytes(memory['total'])} of "
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
    lost = [f"{part_name(name)} +{format_seconds(seconds)}" for name, seconds in ordered if seconds > 0.1 * total > 0]
    gained = [
        f"{part_name(name)} -{format_seconds(-seconds)}"
        for name, seconds in reversed(ordered)
        if seconds < -0.1 * total < 0
    ]
    return ": " + ", ".join([*lost, *gained]) if lost else ""
