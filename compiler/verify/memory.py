"""Whether a machine has the memory that a verification takes, before it swaps or the system ends a process."""

from __future__ import annotations

import os

from ...cost_models.errors import AutoparError
from ...cost_models.units import format_bytes
from ...planner.capture.graph import ITEM_BYTES, Kind, ModelGraph
from ...planner.plan import Plan

# Weights, their start, gradients twice, a copy to step from, two results, and the two moments of AdamW.
REFERENCE_COPIES = 9
# A rank that holds nothing yet: private pages of a process with torch and gloo (Linux, torch 2.13).
RANK_BYTES = 20 << 20
# A step is priced where the results of its operations reach this part of the memory: kernels may keep more than those.
_WORTH_PRICING = 0.25
_SMALLER = "verify it smaller: --shrink with --set of a smaller model (--set preset=tiny, --set num_layers=2 ...)"


def _item_bytes(dtype: str) -> int:
    return ITEM_BYTES["float32" if dtype == "float32" else "float64"]


def _state_bytes(graph: ModelGraph, dtype: str) -> int:
    return REFERENCE_COPIES * _item_bytes(dtype) * sum(info.type.numel for info in graph.tensors.values())


def _there(memory_bytes: int) -> str:
    return f"more than this machine's {format_bytes(memory_bytes)}"


def machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_large_model(graph: ModelGraph, dtype: str, memory_bytes: int) -> None:
    """Refuse a model whose states alone are larger than `memory_bytes`, whatever the plan.

    Raises:
        AutoparError: bytes needed and there.
    """
    numel = sum(info.type.numel for info in graph.tensors.values())
    state_bytes = _state_bytes(graph, dtype)
    if state_bytes > memory_bytes:
        raise AutoparError(
            f"a step of the unsharded module needs {format_bytes(state_bytes)}, {_there(memory_bytes)}",
            where=f"{numel:,} numbers of parameters and buffers, with gradients and two optimizer steps",
            fix=_SMALLER,
        )


def refuse_too_large(graph: ModelGraph, plan: Plan, dtype: str, memory_bytes: int) -> None:
    """Refuse a model whose reference step, or ranks that alone, are larger than `memory_bytes`.

    Raises:
        AutoparError: bytes needed and there.
    """
    refuse_large_model(graph, dtype, memory_bytes)
    there, state_bytes = _there(memory_bytes), _state_bytes(graph, dtype)
    if plan.gpus * RANK_BYTES > memory_bytes:
        raise AutoparError(
            f"{plan.gpus:,} CPU ranks need {format_bytes(plan.gpus * RANK_BYTES)} without any model, {there}",
            where="plan.json: gpus",
            fix="verify a plan like it on at most two ranks an axis: --shrink",
        )
    per_item = _item_bytes(dtype) / ITEM_BYTES["float32"]
    if per_item * result_bytes(graph) < _WORTH_PRICING * memory_bytes:
        return
    step_bytes = step_bytes_of(graph, plan)
    needed_bytes = state_bytes + round(per_item * step_bytes)
    if needed_bytes > memory_bytes:
        in_float32 = state_bytes // per_item + step_bytes
        raise AutoparError(
            f"a step of the unsharded module needs about {format_bytes(needed_bytes)}, {there}",
            where=f"batch {plan.batch_size} in float{8 * _item_bytes(dtype)}: "
            f"{format_bytes(round(per_item * step_bytes))} for what the backward needs",
            fix=f"{'--dtype float32 needs half of that; or ' if in_float32 < memory_bytes else ''}{_SMALLER}",
        )


def result_bytes(graph: ModelGraph) -> int:
    """Of all operations of a step, as captured."""
    by_template = [
        sum(out.num_bytes for node in template.nodes if node.kind is Kind.OP for out in node.outputs)
        for template in graph.templates
    ]
    return sum(by_template[unit.template] for unit in graph.units)


def step_bytes_of(graph: ModelGraph, plan: Plan) -> int:
    """What the unsharded module keeps for its backward and works with, in float32 on a CPU."""
    from ...planner.driver import PlanRequest, check_request, plan_graph

    request = PlanRequest(
        model=plan.model.path,
        gpus=1,
        batch_size=plan.batch_size,
        cluster="cpu-local",
        cluster_overrides={"hbm_gib": 1e9},
        mesh={"dp": 1, "tp": 1, "pp": 1},
        microbatch_size=plan.batch_size,
        zero=0,
        activation_checkpoint="none",
    )
    (stage,) = plan_graph(graph, request, check_request(request)).plan.stages
    return stage.memory_bytes["activations"] + stage.memory_bytes["temporary"]


__all__ = ["machine_bytes", "refuse_too_large"]
