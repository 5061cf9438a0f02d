"""A plan read from a file -> what it was made from: the request with its pins, and the graph of its model."""

from __future__ import annotations

import shlex
from importlib.metadata import version
from typing import TYPE_CHECKING

from .blocks import written
from .errors import AutoparError
from .plan import Plan
from .sharding.mesh import AXES
from .timeline import parse_slow
from .zero import pin_of

if TYPE_CHECKING:
    from .capture.graph import ModelGraph
    from .driver import PlanRequest


def parse_mesh(text: str, *, where: str) -> dict[str, int]:
    """Read "dp=2,tp=2,pp=2"; axes that are not named stay free.

    Raises:
        AutoparError: an unknown axis, an axis given twice, a size below 1.
    """
    found: dict[str, int] = {}
    for item in text.split(","):
        axis, is_assigned, size = (part.strip() for part in item.partition("="))
        if not is_assigned:
            raise AutoparError(f"cannot read {item.strip()!r}", where=where, fix="write --mesh dp=2,tp=2,pp=2")
        if axis not in AXES:
            raise AutoparError(f"there is no mesh axis {axis!r}", where=where, fix=f"axes are {', '.join(AXES)}")
        if axis in found:
            raise AutoparError(f"axis {axis} is given twice", where=where, fix="keep one of the two")
        if not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise AutoparError(f"{axis}={size} is no size", where=where, fix="give a whole number of at least 1")
        found[axis] = int(size)
    return found


def parse_shares(text: str, *, where: str) -> tuple[int, ...]:
    """Read "3,1": the first dp rank takes three times as much of the batch as the second.

    Raises:
        AutoparError: something else than whole numbers of at least 1.
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit()) or int(part) < 1:
            fix = "write --batch-shares 3,1: a whole number of at least 1 for each dp rank"
            raise AutoparError(f"{part!r} is no share", where=where, fix=fix)
    return tuple(map(int, parts))


def request_of(plan: Plan) -> PlanRequest:
    """The request that a plan answers, with what the user pinned.

    Raises:
        AutoparError: a pin that this autopar does not know.
    """
    from .driver import PlanRequest

    pins = dict(plan.pins)
    where = "$.pins of the plan"
    mesh = parse_mesh(pins.pop("mesh"), where=where) if "mesh" in pins else {}
    names = ("microbatch-size", "stages-per-rank", "zero-shard-size")
    numbers = [_whole(pins.pop(name, None), name, where) for name in names]
    microbatch_size, stages_per_rank, shard_size = numbers
    zero = pin_of(pins.pop("zero", None))
    schedule, checkpoint = pins.pop("schedule", None), pins.pop("activation-checkpoint", None)
    may_split_batch = pins.pop("tp-may-split-batch", "false") == "true"
    slow = pins.pop("slow", "")
    shares = parse_shares(pins.pop("batch-shares"), where=where) if "batch-shares" in pins else None
    if pins:
        unknown = ", ".join(sorted(pins))
        raise AutoparError(f"unknown pin {unknown}", where=where, fix="plan again with this autopar")
    return PlanRequest(
        model=f"{plan.model.path}:{plan.model.name}",
        arguments=plan.model.arguments,
        inputs=plan.model.inputs,
        gpus=plan.gpus,
        cluster=plan.cluster,
        cluster_overrides=plan.cluster_overrides,
        batch_size=plan.batch_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        stack=plan.stack,
        mesh=mesh,
        microbatch_size=microbatch_size,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        zero=zero,
        zero_shard_size=shard_size,
        activation_checkpoint=checkpoint,
        exact=plan.solver.exact,
        tp_may_split_batch=may_split_batch,
        slow_ranks=parse_slow(slow.split(",") if slow else (), plan.gpus),
        batch_shares=shares,
    )


def _whole(text: str | None, name: str, where: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()):
        raise AutoparError(f"pin {name} is {text!r}", where=where, fix="give a whole number")
    return int(text)


def command_of(plan: Plan) -> str:
    """The command that plans the same decision anew, with all of it pinned that has an option."""
    options = [("gpus", plan.gpus), ("batch-size", plan.batch_size), ("cluster", plan.cluster)]
    options += [(name.replace("_", "-"), f"{value:g}") for name, value in plan.cluster_overrides.items()]
    options += [("precision", plan.precision), ("optimizer", plan.optimizer), ("stack", plan.stack)]
    options += [("set", f"{key}={value}") for key, value in plan.model.arguments.items()]
    options += [("input", f"{name}={text}") for name, text in plan.model.inputs.items()]
    options += [("slow", text) for text in plan.pins.get("slow", "").split(",") if text]
    options.append(("mesh", ",".join(f"{axis}={size}" for axis, size in plan.mesh.items())))
    options.append(("microbatch-size", plan.batch_size // (plan.mesh.get("dp", 1) * plan.microbatches)))
    if plan.batch_shares:
        options.append(("batch-shares", ",".join(map(str, plan.batch_shares))))
    options += [("schedule", plan.schedule), ("stages-per-rank", plan.stages_per_rank)]
    options.append(("zero", written(plan.zero_by_block) or plan.zero))
    if plan.zero_shard_size:
        options.append(("zero-shard-size", plan.zero_shard_size))
    options.append(("activation-checkpoint", written(plan.checkpoint_by_block) or plan.activation_checkpoint))
    model = f"{plan.model.path}:{plan.model.name}" if plan.model.name else plan.model.path
    return " ".join(["autopar plan", shlex.quote(model), *(f"--{name} {shlex.quote(str(x))}" for name, x in options)])


def graph_of(plan: Plan) -> ModelGraph:
    """Capture the model of a plan again.

    Raises:
        AutoparError: the model is gone, cannot be captured, or is not the one that the plan was made for.
    """
    from .capture import capture_model
    from .fingerprint import fingerprint

    source = plan.model
    graph = capture_model(
        source.path, name=source.name, arguments=source.arguments, inputs=source.inputs, batch_size=plan.batch_size
    ).graph
    found = fingerprint(graph, source.arguments)
    if found != plan.fingerprint:
        raise AutoparError(
            f"the plan was made for another training step: its fingerprint is {plan.fingerprint}, this one's {found}",
            where=f"{source.path}:{source.name}, batch {plan.batch_size}, torch {version('torch')} "
            f"(planned with {plan.torch_version})",
            fix="plan again: the model, its arguments, the batch size or torch have changed",
        )
    return graph
