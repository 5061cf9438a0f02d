"""What of a backward makes gradients of activations (I), and what gradients of weights (W), where a schedule splits it.

PyTorch 2.13 runs I as far as the stage's inputs and keeps, for each weight, the gradient at the operation where its
path joins that of the inputs; W goes on from there. The first stage has no such inputs and does everything in W.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..capture.graph import Value
from ..schedules import get_schedule
from ..sharding.program import Compute, Convert, ModelProgram, TemplateProgram
from ..sharding.redistribute import CollectiveUse


def trained_operands(lowered: TemplateProgram) -> Iterator[tuple[Compute, int, int]]:
    """(operation, operands that come from weights alone, operands with a gradient) in order, those without left out."""
    of_weights = {made for made in lowered.tensors if lowered.template.type_of(made.ref).requires_grad}
    for step in lowered.steps:
        if isinstance(step, Convert):
            if step.source in of_weights:
                of_weights.add(step.target)
            continue
        trained = [v for v, kind in zip(step.operands, step.operand_types, strict=True) if kind.requires_grad]
        mine = sum(v in of_weights for v in trained)
        if trained:
            if mine == len(trained):
                of_weights.update(step.results)
            yield step, mine, len(trained)


def run_twice(lowered: TemplateProgram) -> Iterator[CollectiveUse]:
    """The collectives of backwards that make both: I and W each run them."""
    for step, mine, trained in trained_operands(lowered):
        if 0 < mine < trained:
            yield from (use for use in step.collectives if use.phase == "backward")


def loses_weights(program: ModelProgram, schedule: str, stages: Sequence[tuple[int, int]]) -> str:
    """Why a schedule cannot run these stages: it would not find some of their weights; "" if it can."""
    if get_schedule(schedule).splits_backward:
        for first, last in stages[1:]:
            if unit := _lost_weights(program, first, last):
                return (
                    f"schedule {schedule} would lose gradients: what {unit} makes does not depend on what its stage "
                    "receives"
                )
    return ""


def _lost_weights(program: ModelProgram, first: int, last: int) -> str:
    """A unit of a later stage whose weights W would miss: their path to what is sent meets no input; "" if none."""
    graph = program.graph
    reached: set[Value] = {
        value
        for index in range(first, last)
        for value in graph.units[index].inputs
        if 0 < value.unit < first and graph.type_of(value).requires_grad
    }
    for index in range(first, last):
        unit = graph.units[index]
        lowered = program.templates[unit.template]
        for output, reads in enumerate(lowered.reads):
            value = Value(index, output)
            if any(unit.inputs[position] in reached for position in reads):
                reached.add(value)
            elif graph.type_of(value).requires_grad and _leaves(program, value, last):
                return unit.fqn or lowered.template.name
    return ""


def _leaves(program: ModelProgram, value: Value, last: int) -> bool:
    """Whether a value is sent to a later stage, or is the loss."""
    graph = program.graph
    return value == graph.loss or any(value in unit.inputs for unit in graph.units[last:])


__all__ = ["loses_weights", "run_twice", "trained_operands"]
