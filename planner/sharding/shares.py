"""Lowered program -> whether dp ranks may take different numbers of its microbatches, or why all take as many.

They may where one rank's microbatch is no other rank's business: it splits over dp what it splits over microbatches and
exchanges nothing over dp. The prelude runs once a step on all samples of a rank, however many these are: its code must
not say how many, and over dp it may only add up.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..capture.graph import TensorType
from .mesh import MICROBATCH
from .placement import REPLICATED, Layout, local_type
from .program import Compute, Convert, ModelProgram, TemplateProgram, Var
from .redistribute import COLLECTIVES, TAKES_PART, Change
from .rules import rule_of

_PRELUDE = 0
_RESHAPE = "aten.reshape.default"  # its batch dim is written as -1
_OF_ANY_SIZE = ("", "all_reduce")


def why_even(program: ModelProgram) -> str:
    """Why every dp rank takes as many microbatches as the others; "" where they may differ."""
    if program.mesh.dp == 1:
        return "there is one dp rank"
    if program.mesh.microbatches == 1:
        return "each has one microbatch"
    return next(_reasons(program), "")


def why_even_under(zero: int, stages_per_rank: int) -> str:
    """The same of a policy: FSDP2's collectives must come in one order on all ranks that it shards over."""
    if zero == 3:
        return "ZeRO-3 gathers parameters over dp in every microbatch"
    if zero == 2 and stages_per_rank > 1:
        return "ZeRO-2 gathers the stages of a rank over dp as its microbatches come to them"
    return ""


def _reasons(program: ModelProgram) -> Iterator[str]:
    prelude = program.graph.units[_PRELUDE].template
    for t, lowered in enumerate(program.templates):
        yield from _of_prelude(program, lowered) if t == prelude else _of_microbatch(lowered)
    for unit in range(1, len(program.graph.units)):
        for position in range(len(program.graph.units[unit].inputs)):
            name = program.graph.units[unit].fqn or program.graph.template_of(unit).name
            once, each = program.prepared(unit, position), program.in_microbatch(unit, position)
            if any(change.axis == "dp" for change in (*each, *(c for c in once if not _adds_up(c)))):
                yield f"an input of {name} changes its placement over dp"
            value = program.graph.units[unit].inputs[position]
            made = program.templates[prelude].outputs[value.output].layout if once else {}
            if any(change.axis != "dp" and _moves_samples(change, made) for change in once):
                yield f"an input of {name} is exchanged sample by sample over another axis"


def _adds_up(change: Change) -> bool:
    return change.conversion.forward in _OF_ANY_SIZE


def _moves_samples(change: Change, layout: Layout) -> bool:
    """Whether what it exchanges grows with a dp rank's samples, or its code says how many there are. Code that takes a
    part of each run of a flat value counts the runs that it has. `layout`: of the value before."""
    if not layout.get("dp", REPLICATED).is_split:
        return False
    is_grouped = max(change.source.groups, change.target.groups) > 1
    return change.conversion.forward in COLLECTIVES or (is_grouped and change.conversion.forward != TAKES_PART)


def _of_microbatch(lowered: TemplateProgram) -> Iterator[str]:
    """What a microbatch does that takes all dp ranks."""
    name = lowered.template.name
    for var in (*lowered.inputs, *lowered.tensors):
        if not _is_alike(var):
            yield f"{var.ref.node} of {name} is not split over dp as over microbatches"
    for step in lowered.steps:
        if isinstance(step, Convert):
            if step.change.axis == "dp":
                yield f"{step.source.ref.node} of {name} changes its placement over dp"
            continue
        labels = dict(step.labels)
        if labels.get("dp") != labels.get(MICROBATCH):
            yield f"{step.node.name} of {name} is not split over dp as over microbatches"
        if any(use.axis == "dp" for use in step.collectives):
            yield f"{step.node.name} of {name} communicates over dp"


def _is_alike(var: Var) -> bool:
    return var.layout.get("dp") == var.layout.get(MICROBATCH)


def _of_prelude(program: ModelProgram, lowered: TemplateProgram) -> Iterator[str]:
    """What of the prelude counts on as many samples on every rank."""
    for step in lowered.steps:
        if isinstance(step, Convert):
            if step.change.axis == "dp" and not _adds_up(step.change):
                yield f"{step.source.ref.node} of the inputs changes its placement over dp"
            elif step.change.axis != "dp" and _moves_samples(step.change, step.source.layout):
                yield f"{step.source.ref.node} of the inputs is exchanged sample by sample over {step.change.axis}"
        elif any(use.axis == "dp" for use in step.collectives) or not _is_of_any_size(step, program):
            yield f"{step.node.name} of the inputs depends on how many samples a dp rank has"


def _is_of_any_size(step: Compute, program: ModelProgram) -> bool:
    """Whether the local call is the same as if dp did not split it."""
    labels, rule = dict(step.labels), rule_of(step.node.op)
    if rule is None or labels.get("dp", "none") == "none":
        return True
    axes = tuple(axis for axis in program.mesh.axes if axis.name != "dp")

    def without_dp(value: TensorType, var: Var) -> TensorType:
        return local_type(value, {axis: pair for axis, pair in var.pairs if axis != "dp"}, axes)

    outputs = tuple(without_dp(value, var) for value, var in zip(step.node.outputs, step.results, strict=True))
    sizes = {axis.name: axis.size for axis in axes} | {"dp": 1}
    whole = rule.localise(step.node, labels | {"dp": "none"}, outputs, sizes)
    if step.call.target == _RESHAPE:
        return whole.divide_by == step.call.divide_by
    return whole == step.call


__all__ = ["why_even", "why_even_under"]
