"""What of a block runs again before its backward, step by step."""

from __future__ import annotations

from typing import TypeGuard

from ..checkpointing import POLICIES
from ..sharding.program import Compute, Convert, TemplateProgram
from ..sharding.rules import kept_kernels
from .kernels import stack_work
from .prices import Prices, saved_on_device

# What of a block runs again: nothing, all but products and attention, or all of it. Then what published software does:
# the attention kernel, or all but attention and every second matrix product.
RECOMPUTE = (*POLICIES, "attention", "operations")
NONE, SELECTIVE, FULL, ATTENTION, OPERATIONS = RECOMPUTE


def runs_again(lowered: TemplateProgram, policy: str, prices: Prices) -> list[bool]:
    """Which steps of a template run again."""
    if policy == ATTENTION:
        return [isinstance(step, Compute) and "attention" in step.node.op for step in lowered.steps]
    if policy == OPERATIONS:
        found: list[bool] = []
        products = 0
        for step in lowered.steps:
            if isinstance(step, Convert):
                found.append(False)
                continue
            forward = stack_work(step.node, step.operand_types, step.outputs, prices.stack).forward
            products += bool(forward.gemms)
            found.append(not forward.attention_flops and (not forward.gemms or products % 2 == 0))
        return found
    last = len(lowered.steps)
    if prices.stack.recompute == "until last saved":
        last = 0
        for index, step in enumerate(lowered.steps):
            if isinstance(step, Compute) and any(value.requires_grad for value in step.outputs):
                saved = saved_on_device(step.node, step.operand_types, step.outputs, step.call, prices.kernels)
                # An operand is kept before the operation runs, a result after it.
                if saved.outputs or saved.extra_bytes:
                    last = index + 1
                elif saved.operands:
                    last = index
    return [index < last for index in range(len(lowered.steps))]


def keeps_result(step: Compute | Convert) -> TypeGuard[Compute]:
    """Whether selective checkpointing keeps what a step makes: the result of a product, or of attention."""
    return isinstance(step, Compute) and bool(kept_kernels(step.node.op))
