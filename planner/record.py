"""What the search has found -> the plan as data, with what it was compared with."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING

from .blocks import by_pattern
from .capture.graph import Kind, ModelGraph
from .checkpointing import name_of
from .fingerprint import fingerprint
from .fqn_patterns import fold
from .plan import Alternative, ModelSource, Plan, SolverReport, StagePlan, split_model
from .schedules import get_schedule
from .sharding.mesh import MICROBATCH
from .sharding.placement import REPLICATED, normal, parse_pair
from .sharding.program import model_program
from .zero import highest

if TYPE_CHECKING:
    from .driver import PlanRequest
    from .search.sweep import Candidate, Found, Setting

NUM_ALTERNATIVES = 8


def write_plan(request: PlanRequest, setting: Setting, found: Found) -> Plan:
    """The answer of the search as data."""
    best = found.best
    notes = list(setting.graph.notes)
    if found.batch.obstacle and best.mesh.dp * best.mesh.pp > 1:
        notes.append(f"one microbatch: {found.batch.obstacle}")
    step = best.cost.step_seconds
    gap = (step - found.bound_seconds) / step if step else 0.0
    solver = SolverReport(
        solver="HiGHS",
        status="optimal" if gap <= 1e-9 else ("within gap" if found.is_complete else "time limit"),
        bound_seconds=found.bound_seconds,
        gap_fraction=gap,
        candidates=found.considered,
        solved=found.solved,
        exact=setting.exact,
    )
    plan = plan_of(request, setting, best, solver)
    return replace(plan, alternatives=alternatives(found), pins=_pins(setting), notes=tuple(notes))


def plan_of(request: PlanRequest, setting: Setting, best: Candidate, solver: SolverReport) -> Plan:
    """A priced choice as data, without what it was compared with."""
    from .search.step_collectives import expected_collectives

    graph = setting.graph
    program = model_program(graph, best.placements, best.mesh)
    path, name = split_model(request.model)
    tensors, shapes = tensor_patterns(graph, best)
    return Plan(
        autopar_version=version("autopar"),
        torch_version=version("torch"),
        fingerprint=fingerprint(graph, request.arguments),
        model=ModelSource(
            path=os.path.normpath(path),
            name=name or graph.name,
            arguments=dict(request.arguments),
            inputs=dict(request.inputs),
        ),
        cluster=request.cluster,
        cluster_overrides=dict(request.cluster_overrides),
        gpus=request.gpus,
        batch_size=graph.batch_size,
        precision=request.precision,
        optimizer=request.optimizer,
        stack=request.stack,
        mesh=best.mesh.written,
        microbatches=best.mesh.microbatches,
        schedule=best.schedule,
        zero=highest(best.zero),
        zero_by_block=by_pattern(graph, best.zero),
        zero_shard_size=best.mesh.shards if best.mesh.replicas > 1 else 0,
        batch_shares=best.mesh.shares,
        dp_paces=best.cost.paces,
        activation_checkpoint=name_of(best.activation_checkpoint),
        checkpoint_by_block=by_pattern(graph, best.activation_checkpoint),
        stages=tuple(
            StagePlan(
                first=first,
                last=last,
                fqns=stage_names(graph, first, last),
                num_parameters=cost.num_parameters,
                forward_seconds=cost.forward.total,
                send_seconds=cost.send_seconds,
                backward_seconds=cost.backward.total,
                step_seconds=cost.step_seconds,
                memory_bytes=dict(cost.memory_bytes),
                action_seconds=dict(cost.action_seconds) if best.mesh.pp > 1 else {},
                rank=get_schedule(best.schedule).rank_of(stage, best.mesh.pp),
            )
            for stage, ((first, last), cost) in enumerate(zip(best.stages, best.cost.stages, strict=True))
        ),
        placements={
            template.name: {node: dict(labels) for node, labels in sorted(placement.items())}
            for template, placement in zip(graph.templates, best.placements, strict=True)
            if placement
        },
        tensors=tensors,
        tensor_shapes=shapes,
        step_seconds=best.cost.step_seconds,
        bubble_fraction=best.cost.bubble_fraction,
        memory_capacity_bytes=min(best.hbm_bytes),
        collectives=expected_collectives(
            program,
            best.stages,
            zero=best.zero,
            schedule=best.schedule,
            activation_checkpoint=best.activation_checkpoint,
        ),
        time_breakdown_seconds=dict(best.cost.breakdown),
        alternatives=(),
        solver=solver,
        pins={},
        rank_memory_bytes=tuple(map(dict, best.cost.rank_memory)) if len(best.stages) > best.mesh.pp else (),
    )


def _pins(setting: Setting) -> dict[str, str]:
    found = setting.pins.described()
    if setting.tp_may_split_batch:
        found["tp-may-split-batch"] = "true"
    if setting.slow_ranks:
        found["slow"] = ",".join(f"rank={rank}:{factor:g}" for rank, factor in sorted(setting.slow_ranks.items()))
    return found


def alternatives(found: Found) -> tuple[Alternative, ...]:
    """The best of other meshes, and what people ask for by name."""
    named: dict[tuple[object, ...], str] = {}
    for name, candidate in found.baselines:
        key = _choice(candidate)
        named[key] = f"{named[key]}, {name}" if key in named else name
    others = {_choice(other): other for other in found.runners_up[:NUM_ALTERNATIVES]}
    others |= {_choice(other): other for _, other in found.baselines}
    others.pop(_choice(found.best), None)
    return tuple(_alternative(other, named.get(key, "")) for key, other in others.items())


def _choice(candidate: Candidate) -> tuple[object, ...]:
    """What tells two candidates of one search apart for a person."""
    return candidate.mesh, candidate.schedule, candidate.zero, candidate.activation_checkpoint, candidate.stages


def _alternative(candidate: Candidate, note: str) -> Alternative:
    mesh = candidate.mesh
    fullest = max(candidate.cost.rank_memory, key=lambda memory: memory["total"])
    return Alternative(
        mesh=mesh.written,
        microbatches=mesh.microbatches,
        batch_shares=mesh.shares,
        schedule=candidate.schedule,
        zero=highest(candidate.zero),
        activation_checkpoint=name_of(candidate.activation_checkpoint),
        step_seconds=candidate.cost.step_seconds if candidate.fits else None,
        memory_bytes=candidate.cost.memory_bytes,
        note=note,
        time_breakdown_seconds=dict(candidate.cost.breakdown),
        memory_breakdown_bytes={name: size for name, size in fullest.items() if name != "total" and size},
        stages_per_rank=len(candidate.stages) // mesh.pp,
    )


def tensor_patterns(graph: ModelGraph, best: Candidate) -> tuple[dict[str, dict[str, str]], dict[str, tuple[int, ...]]]:
    """FQN pattern -> axis -> pair, and -> shape, of every parameter that is used."""
    pairs: dict[str, dict[str, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for t, template in enumerate(graph.templates):
        units = [unit for unit in graph.units if unit.template == t]
        for node in template.of_kind(Kind.PARAMETER):
            chosen = best.placements[t].get(node.name, {})
            layout = {axis.name: normal(parse_pair(chosen.get(axis.name, "R")), True) for axis in best.mesh.axes}
            held = {
                name: str(pair) for name, pair in sorted(layout.items()) if pair != REPLICATED and name != MICROBATCH
            }
            fqns = [dict(unit.tensors)[node.name] for unit in units]
            relative = {
                f.removeprefix(f"{u.fqn}.") for f, u in zip(fqns, units, strict=True) if f.startswith(f"{u.fqn}.")
            }
            is_pattern = len(set(fqns)) > 1 and len(relative) == 1 and "*" in template.pattern
            names = [f"{template.pattern}.{relative.pop()}"] if is_pattern else list(dict.fromkeys(fqns))
            for name in names:
                pairs[name], shapes[name] = held, node.output.shape
    return dict(sorted(pairs.items())), dict(sorted(shapes.items()))


def stage_names(graph: ModelGraph, first: int, last: int) -> tuple[str, ...]:
    """FQNs of the units of a stage, runs of numbered ones as "h.{0..5}"."""
    return fold(unit.fqn or graph.templates[unit.template].name for unit in graph.units[max(first, 1) : last])
