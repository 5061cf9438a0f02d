"""A plan edited by hand -> the same decision with all that follows from it: times, memory, collectives, parameters.

Nothing is decided again but what an edit leaves open: which dims microbatches split, in a plan that had one.
"""

from __future__ import annotations

from dataclasses import replace

from ..cost_models.stacks import load_stack
from .blocks import written
from .capture.graph import ModelGraph
from .errors import AutoparError, UnsupportedModel
from .fingerprint import fingerprint
from .placements import checkpointing_of, mesh_of, placements_of, program_of, zero_of
from .plan import Plan
from .plan_json import rounded
from .replay import command_of, request_of
from .sharding.mesh import AXES, MICROBATCH
from .summary import REPRICED
from .zero import KEPT


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

    What the search said of its own answer goes: its bound, and how far from it that was. What it compared with stays,
    and what was pinned is pinned to what the plan decides now.

    Raises:
        AutoparError: the plan does not fit the model, or is for hardware that is not there.
    """
    from .driver import check_request
    from .record import plan_of
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
    found = replace(
        found, model=plan.model, alternatives=plan.alternatives, pins=pins_now(plan, graph), notes=plan.notes
    )
    is_as_said = rounded(replace(found, solver=plan.solver)) == replace(
        plan, autopar_version=found.autopar_version, torch_version=found.torch_version
    )
    return plan if is_as_said else found


def pins_now(plan: Plan, graph: ModelGraph) -> dict[str, str]:
    """What was pinned, as the plan decides it: other than `plan.pins` where an edit goes against them."""
    from .search.batch_shares import pinned_shares
    from .search.pins import Pins, written_shares
    from .search.policies import checkpoints_for, pinned_zero

    request, mesh = request_of(plan), mesh_of(plan)
    pins = Pins(mesh=request.mesh, zero=request.zero, activation_checkpoint=request.activation_checkpoint)
    shares = mesh.shares or (mesh.microbatches,) * mesh.dp
    now = {
        "mesh": ",".join(f"{axis}={mesh.sizes[axis]}" for axis in AXES if axis in request.mesh),
        "microbatch-size": str(plan.batch_size // (mesh.dp * mesh.microbatches)),
        "schedule": plan.schedule,
        "stages-per-rank": str(plan.stages_per_rank),
        "zero": written(plan.zero_by_block) or str(plan.zero),
        "zero-shard-size": str(mesh.shards) if plan.zero >= KEPT else "",
        "activation-checkpoint": written(plan.checkpoint_by_block) or plan.activation_checkpoint,
        "batch-shares": written_shares(shares) if mesh.dp > 1 else "",
    }
    # These can say one thing in several ways.
    is_so = {
        "zero": request.zero is not None and pinned_zero(graph, pins) == zero_of(plan, graph),
        "activation-checkpoint": checkpoints_for(graph, pins) == (checkpointing_of(plan, graph),),
        "batch-shares": request.batch_shares and pinned_shares(request.batch_shares, sum(shares)) == shares,
    }
    return {name: text for name, pin in plan.pins.items() if (text := pin if is_so.get(name) else now.get(name, pin))}


def was_edited(plan: Plan, graph: ModelGraph) -> bool:
    """Whether the plan is no longer what the search found for its model; False where the model is another now."""

    is_of_model = plan.fingerprint == fingerprint(graph, plan.model.arguments)
    return is_of_model and (plan.solver.status == REPRICED or pins_now(plan, graph) != plan.pins)
