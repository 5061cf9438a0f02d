"""A plan too large for this machine -> the request for one like it on at most two ranks an axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ...planner.blocks import blocks_of, written
from ...planner.fqn_patterns import expand
from ...planner.plan import Plan

if TYPE_CHECKING:
    from ...planner.capture.graph import ModelGraph
    from ...planner.driver import PlanRequest

AXIS_LIMIT = 2
_UNEVEN = (4, 2)  # microbatches of dp ranks that take different numbers


def shrunk_request(plan: Plan, arguments: Mapping[str, object] | None = None) -> PlanRequest:
    """Same model, schedule, ZeRO stage, checkpointing and samples a microbatch; axes and microbatches at most 2, or
    twice as many microbatches on every other dp rank where these take different numbers.

    What differs by block is for `with_policies` to say, once the blocks are known. `arguments` replace
    build arguments of the model, to make it smaller.
    """
    from ...planner.replay import request_of

    mesh = {axis: min(size, AXIS_LIMIT) for axis, size in plan.mesh.items()}
    if plan.zero_shard_size:
        mesh["dp"] = AXIS_LIMIT * AXIS_LIMIT  # both parts of dp
    microbatches = min(plan.microbatches, AXIS_LIMIT)
    shares = (1,) * mesh["dp"] if mesh["dp"] > 1 else None
    if plan.batch_shares:
        # A pipeline of two ranks may ask for a multiple of two.
        shares = tuple(_UNEVEN[rank % AXIS_LIMIT] for rank in range(mesh["dp"]))
        microbatches = sum(shares) // len(shares)
    microbatch_size = plan.batch_size // (plan.mesh["dp"] * plan.microbatches)
    request = request_of(plan)
    return replace(
        request,
        arguments={**request.arguments, **(arguments or {})},
        gpus=prod(mesh.values()),
        mesh=mesh,
        batch_size=microbatch_size * mesh["dp"] * microbatches,
        microbatch_size=microbatch_size,
        batch_shares=shares,
        slow_ranks={},
        schedule=plan.schedule,
        zero=None if plan.zero_by_block else plan.zero,
        zero_shard_size=AXIS_LIMIT * mesh.get("cp", 1) if plan.zero_shard_size else None,
        activation_checkpoint=None if plan.checkpoint_by_block else plan.activation_checkpoint,
    )


def with_policies(request: PlanRequest, plan: Plan, graph: ModelGraph) -> PlanRequest:
    """The shrunk request with what differs by block: each of as many blocks or fewer does as one at its place does."""
    return replace(
        request,
        activation_checkpoint=_shrunk(plan, graph, plan.checkpoint_by_block) or plan.activation_checkpoint,
        zero=_shrunk(plan, graph, plan.zero_by_block) or plan.zero,
    )


def _shrunk(plan: Plan, graph: ModelGraph, by_block: Mapping[str, object]) -> str:
    """The pin of what the plan's blocks do; empty where they do not differ, or there are none."""
    policies = {name: policy for pattern, policy in by_block.items() for name in expand(pattern)}
    held = dict.fromkeys(name for stage in plan.stages for pattern in stage.fqns for name in expand(pattern))
    before, blocks = [name for name in held if name in policies], blocks_of(graph)
    if not before:
        return ""
    return written({block: policies[before[i * len(before) // len(blocks)]] for i, block in enumerate(blocks)})


def not_covered(plan: Plan, shrunk: Plan) -> tuple[str, ...]:
    """What a verification of `shrunk` says nothing about."""
    text = {
        name: ",".join(f"{axis}={size}" for axis, size in p.mesh.items()) for name, p in (("p", plan), ("s", shrunk))
    }
    notes = [
        f"shrunk: ran {text['s']} in place of {text['p']}, {shrunk.microbatches} of {plan.microbatches} microbatches"
    ]
    cut = [axis for axis, size in plan.mesh.items() if size > AXIS_LIMIT]
    if cut:
        notes.append(
            f"not covered: groups of more than {AXIS_LIMIT} ranks on {', '.join(cut)}, and splits into that many parts"
        )
    if plan.mesh["pp"] > AXIS_LIMIT:
        notes.append("not covered: pipeline stages that both receive and send")
    if dict(plan.model.arguments) != dict(shrunk.model.arguments):
        notes.append("not covered: the model in its own size")
    differing = sorted(
        name
        for name in plan.tensors.keys() | shrunk.tensors.keys()
        if plan.tensors.get(name) != shrunk.tensors.get(name)
    )
    if differing:
        notes.append(f"not covered: the plan's placement of {', '.join(differing)}, which differs on the small mesh")
    return tuple(notes)
