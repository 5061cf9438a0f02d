"""A plan edited by hand -> the same decision with all that follows from it: times, memory, collectives, parameters.

Nothing is decided again but what an edit leaves open: which dims microbatches split, in a plan that had one.
"""

from __future__ import annotations

from dataclasses import replace

from ..cost_models.stacks import load_stack
from .capture.graph import ModelGraph
from .errors import AutoparError, UnsupportedModel
from .explain import REPRICED
from .placements import checkpointing_of, placements_of, program_of, zero_of
from .plan import Plan
from .plan_json import rounded
from .replay import command_of, request_of
from .sharding.mesh import MICROBATCH


def completed(plan: Plan, graph: ModelGraph) -> Plan:
    """The plan with what its microbatches split, where it has several and its placements are those of one.

    Raises:
        AutoparError: the batch of this model cannot be cut.
        UnsupportedModel: not under these placements.
    """
    nodes = (labels for placement in plan.placements.values() for labels in placement.values())
    if plan.microbatches == 1 or any(MICROBATCH in labels for labels in nodes):
        return plan
    from .search.batch import find_batch_split
    from .search.prices import in_precision
    from .search.space import Space

    found = find_batch_split(Space(in_precision(graph, plan.precision)))
    if found.placements is None or found.obstacle:
        raise AutoparError(
            f"the batch cannot be cut into {plan.microbatches} microbatches: {found.obstacle}",
            where="microbatches of the plan",
            fix="write 1",
        )
    placements = {name: dict(placement) for name, placement in plan.placements.items()}
    for template, batch in zip(graph.templates, found.placements, strict=True):
        placed = placements.setdefault(template.name, {})
        for name, labels in batch.items():
            placed[name] = {**placed.get(name, {}), **labels}
    cut = replace(plan, placements={name: placed for name, placed in placements.items() if placed})
    try:
        program_of(cut, graph)
    except UnsupportedModel as error:
        what = f"what was placed for one microbatch does not go with {plan.microbatches}: {error.what}"
        raise UnsupportedModel(what, where=error.where, fix=f"plan anew: {command_of(plan)}") from None
    return cut


def priced_again(plan: Plan, graph: ModelGraph) -> Plan:
    """The plan with predictions of what it says now; as it is where they are what it says already.

    What the search said of its own answer goes: its bound, and how far from it that was. What it compared with stays.

    Raises:
        AutoparError: the plan does not fit the model, or is for hardware that is not there.
    """
    from .driver import check_request, plan_of
    from .search.answer import Setting
    from .search.pins import Pins
    from .search.prices import in_precision
    from .search.pricing import Pricer
    from .search.rank_speeds import devices_of
    from .search.space import Space

    request, program = request_of(plan), program_of(plan, graph)
    cluster, stack = check_request(request), load_stack(plan.stack)
    space = Space(in_precision(graph, plan.precision))
    devices = devices_of(space, graph, cluster, stack, gpus=plan.gpus, slow_ranks=request.slow_ranks)
    even = (1,) * program.mesh.dp if devices.differ and program.mesh.dp > 1 else None
    setting = Setting(
        graph=graph,
        gpus=plan.gpus,
        cluster=devices.cluster,
        stack=stack,
        precision=plan.precision,
        optimizer=plan.optimizer,
        pins=Pins(mesh={}, batch_shares=plan.batch_shares or even),
        slow_ranks=request.slow_ranks,
    )
    candidate = Pricer(setting=setting, space=space, devices=devices).whole(
        program.mesh,
        placements_of(plan, graph),
        tuple((stage.first, stage.last) for stage in plan.stages),
        plan.schedule,
        zero_of(plan, graph),
        checkpointing_of(plan, graph),
    )
    solver = replace(plan.solver, status=REPRICED, bound_seconds=0.0, gap_fraction=1.0)
    found = plan_of(request, setting, candidate, solver)
    found = replace(found, model=plan.model, alternatives=plan.alternatives, pins=plan.pins, notes=plan.notes)
    is_as_said = rounded(replace(found, solver=plan.solver)) == replace(
        plan, autopar_version=found.autopar_version, torch_version=found.torch_version
    )
    return plan if is_as_said else found
