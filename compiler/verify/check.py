"""Plan + emitted package -> the proof, or what is wrong: the one entry of this folder.

Two things are held against the user's module and the plan: every value of a training step, and every collective.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from ...planner.capture.graph import Kind, ModelGraph, Symbol
from ...planner.checkpointing import Checkpointing, described
from ...planner.errors import CheckFailed
from ...planner.plan import Plan
from ...planner.search.step_collectives import expected_collectives
from ...planner.sharding.mesh import Mesh
from ...planner.sharding.program import ModelProgram
from ...planner.zero import Zero
from ..exporters.pytorch.tensors import DEFAULT_DTYPE
from .memory import machine_bytes, refuse_large_model, refuse_too_large
from .rank import RankJob, RankResult, run_rank
from .ranks import run_ranks
from .reference import Reference, run_reference
from .report import CollectiveMismatch, RankFailure, ValueCheck, VerifyReport
from .shrink import not_covered, shrunk_request, with_policies

TOLERANCE = {"float64": 1e-9, "float32": 1e-5}
# Where the module itself computes in fewer bits, a sum over ranks rounds otherwise by a few units in the last place.
LOW_PRECISION_TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}
DEFAULT_TIMEOUT_SECONDS = 600.0
# (axis, operation, payload bytes) -> count
Lines = Counter[tuple[str, str, int]]


def verify(
    plan: Plan,
    package: Path,
    *,
    graph: ModelGraph | None = None,
    shrink: bool = False,
    arguments: Mapping[str, object] | None = None,
    dtype: str = "auto",
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> VerifyReport:
    """Run the package on CPU ranks against the user's module and return what was found; it never hangs.

    `package` is the folder of sharded_model.py. `graph` saves capturing the model again.
    `dtype` is "float64", "float32" or "auto": float64 where all of the model follows the dtype of its weights.
    `shrink` verifies a plan like this one on at most two ranks an axis instead, made and emitted anew, with
    `arguments` of the model replaced; the notes say what that does not cover.

    Raises:
        CheckFailed: the user's module itself does not run on the CPU.
        AutoparError: the model file or the plan cannot be read.
    """
    if shrink:
        return _verify_shrunk(plan, arguments, dtype, timeout_seconds)
    begin = time.monotonic()
    path = os.path.abspath(plan.model.path)
    if graph is None:
        from ...planner.replay import graph_of  # torch.export, not needed by ranks that import this package

        graph = graph_of(plan)
    refuse_too_large(graph, plan, dtype, machine_bytes())
    notes: list[str] = []
    if dtype == "auto" and (fixed := fixed_dtype(graph)):
        dtype = "float32"
        notes.append(f"float32, because of the model's own {fixed}")
    if graph.is_random:
        notes.append("values compared with dropout switched off and draws fixed on both sides; ranks draw their own")
    from ...planner.placements import checkpointing_of, program_of, zero_of

    program, checkpointing, zero = program_of(plan, graph), checkpointing_of(plan, graph), zero_of(plan, graph)
    with tempfile.TemporaryDirectory(prefix="autopar-verify-") as folder:
        dtype, fixed = _make_reference(plan, path, dtype, folder, timeout_seconds)
        if fixed:
            notes.append(f"float32, because in float64 {fixed}")
        tolerance = TOLERANCE[dtype]
        if low := lowest_precision(graph):
            tolerance = max(tolerance, LOW_PRECISION_TOLERANCE[low])
            notes.append(f"tolerance of {low}, in which a part of the model computes")
        results, failure, reference = _run(plan, package, folder, graph, dtype, tolerance, timeout_seconds)
    found = VerifyReport(
        mesh=plan.mesh,
        microbatches=plan.microbatches,
        batch_shares=plan.batch_shares,
        schedule=plan.schedule,
        zero=plan.zero,
        zero_by_block=plan.zero_by_block,
        activation_checkpoint=described(plan.checkpoint_by_block) or plan.activation_checkpoint,
        dtype=dtype,
        tolerance=tolerance,
        seconds=time.monotonic() - begin,
        num_values=0,
        worst={},
        failure=failure,
        notes=tuple(notes),
    )
    if failure is not None or reference is None:
        return found
    checks = [check for result in results for check in result.checks]
    worst: dict[str, float] = {}
    for check in checks:
        worst[check.what] = max(worst.get(check.what, 0.0), check.relative)
    bad = [check for check in checks if not check.ok]
    bad += _missing(graph, reference, results)
    return replace(
        found,
        seconds=time.monotonic() - begin,
        num_values=len(checks),
        worst=worst,
        bad_values=tuple(sorted(bad, key=lambda check: (check.what, check.name, check.rank))),
        collectives=sum(sum(result.recorded.values()) for result in results),
        mismatches=tuple(compare_collectives(plan, program, zero, checkpointing, results)),
    )


def _verify_shrunk(
    plan: Plan, arguments: Mapping[str, object] | None, dtype: str, timeout_seconds: float
) -> VerifyReport:
    from ...planner.driver import capture, check_request, plan_graph
    from ...planner.plan_json import relative_to
    from ..package import emit_package

    graph, request = capture(shrunk_request(plan, arguments))
    refuse_large_model(graph, dtype, machine_bytes())
    request = with_policies(request, plan, graph)
    planned = plan_graph(graph, request, check_request(request))
    with tempfile.TemporaryDirectory(prefix="autopar-shrunk-") as folder:
        package = Path(folder, "package")
        emit_package(relative_to(planned.plan, package), planned.graph, package, force=False)
        found = verify(planned.plan, package, graph=planned.graph, dtype=dtype, timeout_seconds=timeout_seconds)
    return replace(found, notes=(*not_covered(plan, planned.plan), *found.notes))


def fixed_dtype(graph: ModelGraph) -> str:
    """What keeps the model from running in another dtype: a cast to a named floating dtype, a tensor of one; or ""."""
    for name, info in graph.tensors.items():
        dtype = info.type.dtype
        if dtype != DEFAULT_DTYPE and dtype.startswith(("complex", "float", "bfloat")):
            return f"{'complex' if dtype.startswith('complex') else dtype} tensor {name}"
    for template in graph.templates:
        for node in template.nodes:
            if node.kind is not Kind.OP or not node.output.dtype.startswith(("float", "bfloat")):
                continue
            arguments = [*node.args, *(value for _, value in node.kwargs)]
            named = [a.name for a in arguments if isinstance(a, Symbol) and a.kind == "dtype"]
            is_cast = any(template.type_of(ref).dtype != node.output.dtype for ref in node.operands)
            if is_cast and any(name.startswith(("float", "bfloat")) for name in named):
                return f"cast to {named[0]} ({node.source or node.name})"
    return ""


def lowest_precision(graph: ModelGraph) -> str:
    """The dtype of fewest bits below float32 that an operation computes in; "" if none does."""
    outputs = {out.dtype for t in graph.templates for n in t.nodes if n.kind is Kind.OP for out in n.outputs}
    return next((dtype for dtype in LOW_PRECISION_TOLERANCE if dtype in outputs), "")


def _make_reference(plan: Plan, path: str, dtype: str, folder: str, timeout_seconds: float) -> tuple[str, str]:
    """Save the reference step in the folder; its dtype, and what kept "auto" from float64.

    A cast that changes nothing in float32 is not in the graph (`x.float()`), so only a run in float64 shows it.
    """
    tries = ("float64", "float32") if dtype == "auto" else (dtype,)
    reason = ""
    for wanted in tries:
        saved = os.path.join(folder, "reference.pt")
        arguments = (plan.model, path, plan.batch_size, wanted, saved)
        answers, failure = run_ranks(run_reference, [arguments], timeout_seconds=timeout_seconds)
        if failure is None and (wanted == tries[-1] or not answers[0]):
            return wanted, reason
        if failure is not None and not failure.traceback:  # time is up, or it died: no other dtype would help
            reason = failure.error
            break
        reason = f"the module stops: {failure.error}" if failure is not None else str(answers[0])
    raise CheckFailed(
        f"the unsharded module does not run: {reason.removeprefix('the module stops: ')}",
        where=f"{path}:{plan.model.name}, one training step on the CPU, batch {plan.batch_size}, {tries[-1]}",
        fix="a step too large for this machine can be checked smaller: --shrink, or --set a smaller model",
    )


def _run(
    plan: Plan, package: Path, folder: str, graph: ModelGraph, dtype: str, tolerance: float, timeout_seconds: float
) -> tuple[list[RankResult], RankFailure | None, Reference | None]:
    """Every rank, held to the reference in the folder."""
    saved = os.path.join(folder, "reference.pt")
    world_size = prod(plan.mesh.values())
    jobs = [
        RankJob(
            rank=rank,
            world_size=world_size,
            package=str(package.resolve()),
            reference=saved,
            store=os.path.join(folder, "store"),
            dtype=dtype,
            tolerance=tolerance,
            batch_dims={value.name: value.batch_dim for value in graph.inputs},
            shares=plan.batch_shares,
            is_random=graph.is_random,
            timeout_seconds=timeout_seconds,
        )
        for rank in range(world_size)
    ]
    answers, failure = run_ranks(run_rank, [(job,) for job in jobs], timeout_seconds=timeout_seconds)
    results = [answer for answer in answers if isinstance(answer, RankResult)]
    reference = Reference.load(Path(saved)) if failure is None else None
    return results, failure, reference


def _missing(graph: ModelGraph, reference: Reference, results: Sequence[RankResult]) -> list[ValueCheck]:
    """Trainable parameters, and buffers that the step changes, that no rank holds."""
    held = frozenset().union(*(result.names for result in results))
    changed = {
        name
        for name, value in reference.buffers.items()
        if name in reference.state and not value.equal(reference.state[name])
    }
    missing = []
    for name, info in graph.tensors.items():
        if held & {name, *info.aliases}:
            continue
        if name in reference.gradients or name in changed:
            what = "gradient" if name in reference.gradients else "buffer"
            note = f"{name} (held by no rank)"
            missing.append(ValueCheck(what=what, name=note, rank=-1, relative=float("inf"), ok=False))
    return missing


def compare_collectives(
    plan: Plan, program: ModelProgram, zero: Zero, checkpointing: Checkpointing, results: Sequence[RankResult]
) -> list[CollectiveMismatch]:
    """Recorded against planned collectives, both ways; and the plan's own list against its placements."""
    stages = [(stage.first, stage.last) for stage in plan.stages]
    mesh = program.mesh
    found: list[CollectiveMismatch] = []
    for state_rank in range(mesh.state_ranks):
        lines = expected_collectives(
            program,
            stages,
            zero=zero,
            schedule=plan.schedule,
            activation_checkpoint=checkpointing,
            state_rank=state_rank,
        )
        if state_rank == 0 and plan.collectives != lines:
            found.extend(_stale(plan, lines))
        for rank, result in enumerate(results):
            if mesh.state_rank(rank) != state_rank:
                continue
            planned: Lines = Counter()
            for line in lines:
                if line.stage == mesh.coordinate(rank, "pp"):
                    planned[_axis_key(line.axis, rank, mesh), line.op, line.num_bytes] += line.count
            recorded: Lines = Counter()
            for (ranks, op, num_bytes), count in result.recorded.items():
                recorded[_axis_of(ranks, rank, mesh), op, num_bytes] += count
            found.extend(_differences(rank, planned, recorded))
    return sorted(found, key=lambda mismatch: (mismatch.rank, mismatch.axis, mismatch.op, mismatch.num_bytes))


def _differences(rank: int, planned: Lines, recorded: Lines) -> list[CollectiveMismatch]:
    return [
        CollectiveMismatch(
            rank=rank, axis=axis, op=op, num_bytes=num_bytes, planned=planned[axis, op, num_bytes],
            recorded=recorded[axis, op, num_bytes],
        )
        for axis, op, num_bytes in sorted(planned.keys() | recorded.keys())
        if planned[axis, op, num_bytes] != recorded[axis, op, num_bytes]
    ]  # fmt: skip


def _stale(plan: Plan, lines: Sequence[object]) -> list[CollectiveMismatch]:
    """The plan's list against the one that follows from its placements (rank -1: no rank has run for this)."""

    def summed(items: Sequence[object]) -> Lines:
        counts: Lines = Counter()
        for item in items:
            counts[f"{item.axis} (stage {item.stage})", item.op, item.num_bytes] += item.count  # pyright: ignore
        return counts

    return _differences(-1, summed(plan.collectives), summed(lines))


def _axis_key(axis: str, rank: int, mesh: Mesh) -> str:
    """An axis by the ranks it joins: the world is an axis if only one is larger than 1; ties run along pp."""
    return "pp" if axis == "tied" else _axis_of(mesh.joined(axis, rank), rank, mesh)


def _axis_of(ranks: tuple[int, ...], rank: int, mesh: Mesh) -> str:
    """What the ranks of a group are on a line of, through `rank`: an axis, or several that ZeRO takes together."""
    for axis in (*mesh.sizes, "dp_cp", "dp_shard", "dp_replicate"):
        line = set(mesh.joined(axis, rank))
        # Ties may join some stages only; the other axes always take part as a whole.
        if len(ranks) > 1 and (set(ranks) == line or (axis == "pp" and set(ranks) < line)):
            return axis
    return "world" if len(ranks) == mesh.world_size else f"ranks {','.join(map(str, ranks))}"
