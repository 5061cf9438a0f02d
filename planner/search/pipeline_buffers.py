"""What published pipeline engines keep on a stage beyond what its schedule needs, by the choice of a stack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...cost_models.stacks import Stack
from ..capture.graph import ITEM_BYTES
from ..schedules import Alive
from ..sharding.program import Compute, ModelProgram
from .stage_cost import PricedStage

_LOSS = "aten.cross_entropy_loss.default"


def microbatches_kept(
    scheduled: tuple[tuple[Alive, ...], ...], mine: Sequence[int], stack: Stack, num_stages: int
) -> tuple[tuple[Alive, ...], ...]:
    """Of how many microbatches the stages of a rank, `mine`, hold what autograd keeps; `scheduled` as `kept_at_once`.

    Source: github.com/Oneflow-Inc/oneflow, job_rewriter/pipeline_buffer_pass.cpp: between forward and backward of every
    stage but the last a buffer of twice as many as there are stages, beside the one that is being made.
    """
    if stack.pipeline_buffers != "two a stage":
        return scheduled
    room = Alive(2 * num_stages + 1)
    return tuple(
        tuple(room if s + 1 < num_stages else n for n, s in zip(counts, mine, strict=True)) for counts in scheduled
    )


def buffered(priced: PricedStage, stage: int, program: ModelProgram, stack: Stack, num_stages: int) -> PricedStage:
    """With what the engine keeps of a stage besides: parameters cast for each microbatch, or another one's logits.

    Source: as `microbatches_kept`, and github.com/deepspeedai/DeepSpeed, runtime/pipe/engine.py: each of the last
    stage's two buffers keeps its output, logits in float32, until it is used again.
    """
    is_last, still = stage + 1 == num_stages, priced.still
    if num_stages == 1 or stack.pipeline_buffers == "as scheduled":
        return priced
    if stack.pipeline_buffers == "two a stage":
        more = 0 if is_last or not still.master_weights else 2 * num_stages * still.parameters
    else:
        more = ITEM_BYTES["float32"] * _num_logits(program) if is_last else 0
    return replace(priced, still=replace(still, gather_buffers=still.gather_buffers + more))


def _num_logits(program: ModelProgram) -> int:
    """On one rank, of one microbatch."""
    last = program.templates[program.graph.units[-1].template]
    return sum(
        step.operand_types[0].numel for step in last.steps if isinstance(step, Compute) and step.node.op == _LOSS
    )
