"""The sample models on every small mesh: plan with the mesh pinned, emit, verify; one row each.

    python benchmarks/verify_table.py --only gpt,llama --jobs 2
    python benchmarks/verify_table.py --policies --jobs 2

Prints model, mesh, what came of it (verified, refused with the reason, FAILED with the difference), the worst relative
error and the seconds taken. Exit code 5 if a row failed. Rows run in processes forked from one that has imported
everything; --jobs of them at a time. --policies takes 8 ranks and, instead of meshes, combinations of ZeRO stage,
schedule and activation checkpointing: so many that every two of these options meet in some row.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from math import prod
from pathlib import Path

SAMPLE_MODELS = Path(__file__).resolve().parent.parent / "sample_models"
SIZES = (2, 4, 8)
EXIT_FAILED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, the largest pp it is asked to run on, and meshes beside those of dp, tp and pp."""

    model: str
    batch_size: int
    pp_limit: int = max(SIZES)
    one_microbatch: bool = False
    more_meshes: tuple[str, ...] = ()


CASES = (
    Case(model="gpt", batch_size=16),
    Case(
        model="llama",
        batch_size=16,
        more_meshes=("cp=2", "cp=4", "dp=2,cp=2", "cp=2,tp=2", "pp=2,cp=2", "pp=2,dp=2,cp=2", "dp=2,cp=2,tp=2"),
    ),
    Case(
        model="moe",
        batch_size=16,
        pp_limit=4,
        more_meshes=("ep=2", "ep=4", "dp=2,ep=2", "dp=2,ep=4", "ep=2,tp=2", "pp=2,ep=2", "ep=2,cp=2", "dp=2,ep=2,tp=2"),
    ),
    Case(model="mlp", batch_size=64),
    Case(model="resnet", batch_size=8, pp_limit=4, one_microbatch=True),
    Case(model="matrix_factorization", batch_size=64, pp_limit=1),
    Case(model="logistic_regression", batch_size=64, pp_limit=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """status: "verified" | "refused" | "FAILED"; `detail` is the reason or the first difference."""

    model: str
    mesh: str
    plan: str
    status: str
    worst_relative_error: float | None
    collectives: int
    seconds: float
    detail: str = ""


def meshes(case: Case) -> Iterator[dict[str, int]]:
    """Every (dp, tp, pp) whose product is 2, 4 or 8, and the case's own."""
    for world in SIZES:
        for pp in (1, *SIZES):
            for tp in (1, *SIZES):
                if pp <= case.pp_limit and world % (pp * tp) == 0:
                    yield {"pp": pp, "dp": world // (pp * tp), "tp": tp}
    for mesh in case.more_meshes:
        yield _read(mesh)


def _read(mesh: str) -> dict[str, int]:
    """ "dp=2,cp=2" as sizes, those of axes that are not named 1."""
    sizes = dict.fromkeys(("pp", "dp", "tp"), 1)
    return sizes | {axis: int(size) for axis, _, size in (item.partition("=") for item in mesh.split(","))}


def _named(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={mesh[axis]}" for axis in ("dp", "ep", "cp", "tp", "pp") if axis in mesh)


Pins = dict[str, object]
ZERO: tuple[Pins, ...] = (
    {"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 2, "zero_shard_size": 2},
    {"zero": 3, "zero_shard_size": 2},
)  # fmt: skip
POLICY_MODELS = ("gpt", "llama")
SAMPLES_A_MICROBATCH = 1  # so that every schedule has microbatches enough


def covering(every: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Some of these choices, so that every two options that meet in any of them meet in one of those.

    Greedy: always the choice, the first of equals, in which most pairs meet that have not met yet.
    """

    def pairs(choice: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(choice), 2))

    missing = set().union(*map(pairs, every))
    found: list[tuple[int, ...]] = []
    while missing:
        best = max(every, key=lambda choice: len(pairs(choice) & missing))
        found.append(best)
        missing -= pairs(best)
    return found


def policies(batch_size: int) -> Iterator[tuple[dict[str, int], Pins]]:
    """Meshes of 8 ranks with the policies that are pinned on them."""
    from autopar.planner.checkpointing import POLICIES
    from autopar.planner.schedules import get_schedule, schedule_names

    schedules = schedule_names()
    every = product(range(len(ZERO)), range(len(schedules)), range(len(POLICIES)))
    for zero, schedule, checkpoint in covering(list(every)):
        pp = 1 if schedules[schedule] == "none" else 2
        dp = 4 if pp == 1 or "zero_shard_size" in ZERO[zero] else 2
        order = get_schedule(schedules[schedule])
        is_whole = pp > 1 and all(order.refuse(pp, stages, pp) for stages in order.stages_per_rank)
        yield {"pp": pp, "dp": dp, "tp": 8 // pp // dp}, {
            **ZERO[zero], "schedule": schedules[schedule], "activation_checkpoint": POLICIES[checkpoint],
            "microbatch_size": batch_size // dp if is_whole else SAMPLES_A_MICROBATCH,
        }  # fmt: skip


def run_case(case: Case, mesh: dict[str, int], pins: dict[str, object], timeout_seconds: float) -> Row:
    """Plan, emit and verify one mesh."""
    from autopar.compiler.package import emit_package
    from autopar.compiler.verify import verify
    from autopar.cost_models.errors import AutoparError
    from autopar.planner.driver import PlanRequest, make_plan
    from autopar.planner.errors import CheckFailed

    begin = time.monotonic()
    name = _named(mesh)

    def row(status: str, *, plan: str = "", error: float | None = None, collectives: int = 0, detail: str = "") -> Row:
        return Row(
            model=case.model, mesh=name, plan=plan, status=status, worst_relative_error=error, collectives=collectives,
            seconds=time.monotonic() - begin, detail=detail,
        )  # fmt: skip

    request = PlanRequest(
        model=str(SAMPLE_MODELS / f"{case.model}.py"),
        gpus=prod(mesh.values()),
        batch_size=case.batch_size,
        mesh=mesh,
        **pins,
    )
    try:
        planned = make_plan(request)
    except CheckFailed:
        raise
    except AutoparError as error:
        return row("refused", detail=str(error).splitlines()[0])
    plan = planned.plan
    within = f"/{plan.zero_shard_size}" if plan.zero_shard_size else ""
    how = f"m={plan.microbatches} {plan.schedule} zero={plan.zero}{within} ac={plan.activation_checkpoint}"
    try:
        with tempfile.TemporaryDirectory(prefix="autopar-table-") as folder:
            package = Path(folder, "package")
            emit_package(plan, planned.graph, package, force=False)
            report = verify(plan, package, graph=planned.graph, timeout_seconds=timeout_seconds)
    except AutoparError as error:
        return row("FAILED", plan=how, detail=str(error).replace("\n", ";"))
    if report.ok:
        return row("verified", plan=how, error=report.worst_relative_error, collectives=report.collectives)
    wrong = [line.strip() for line in report.lines() if line.startswith(("FAILED", "  ", "values differ"))]
    error = report.worst_relative_error if report.worst else None
    return row("FAILED", plan=how, error=error, collectives=report.collectives, detail="; ".join(wrong[:3]))


def _run_guarded(task: tuple[Case, dict[str, int], dict[str, object], float]) -> Row:
    case, mesh, pins, timeout_seconds = task
    begin = time.monotonic()
    try:
        return run_case(case, mesh, pins, timeout_seconds)
    except Exception as error:  # a crash is a row of the table, not its end
        name = _named(mesh)
        return Row(
            model=case.model, mesh=name, plan="", status="FAILED", worst_relative_error=None, collectives=0,
            seconds=time.monotonic() - begin, detail=f"{type(error).__name__}: {str(error).splitlines()[0:1]}",
        )  # fmt: skip


def table_line(row: Row) -> str:
    error = "-" if row.worst_relative_error is None else f"{row.worst_relative_error:.1e}"
    line = (
        f"{row.model:<22}{row.mesh:<21}{row.plan:<36}{row.status:<10}{error:>9}{row.collectives:>7}{row.seconds:>8.1f}"
    )
    return f"{line}  {row.detail}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models, separated by commas; all without it")
    parser.add_argument("--mesh", default="", help='one mesh only: "dp=2,tp=2,pp=2"')
    parser.add_argument("--policies", action="store_true", help="pairs of policies on 8 ranks instead of meshes")
    parser.add_argument("--every", type=int, default=1, help="only every n-th row, for a quick look")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument(
        "--pin", action="append", default=[], help="zero=3, schedule=gpipe, activation_checkpoint=full ..."
    )
    parser.add_argument("--timeout-seconds", type=float, default=300.0, help="for each row")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    every = POLICY_MODELS if arguments.policies else [case.model for case in CASES]
    names = arguments.only.split(",") if arguments.only else every
    unknown = set(names) - {case.model for case in CASES}
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(c.model for c in CASES)}")
    pins: dict[str, object] = {}
    for pin in arguments.pin:
        key, _, value = pin.partition("=")
        pins[key] = int(value) if value.isdigit() else value
    tasks = []
    for case in CASES:
        if case.model not in names:
            continue
        wanted = policies(case.batch_size) if arguments.policies else ((mesh, {}) for mesh in meshes(case))
        for mesh, more in wanted:
            if not arguments.mesh or _read(arguments.mesh) == mesh:
                tasks.append((case, mesh, {**more, **pins}, arguments.timeout_seconds))
    tasks = tasks[:: arguments.every]
    header = f"{'model':<22}{'mesh':<21}{'plan':<36}{'result':<10}{'error':>9}{'coll.':>7}{'seconds':>8}"
    if not arguments.json:
        print(header, flush=True)
    rows: list[Row] = []
    for row in _rows(tasks, arguments.jobs):
        rows.append(row)
        print(table_line(row), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    counts = {status: sum(row.status == status for row in rows) for status in ("verified", "refused", "FAILED")}
    if arguments.json:
        print(json.dumps({"schema_version": 1, "counts": counts, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return EXIT_FAILED if counts["FAILED"] else 0


def _rows(tasks: list[tuple[Case, dict[str, int], dict[str, object], float]], jobs: int) -> Iterator[Row]:
    if jobs == 1:
        yield from map(_run_guarded, tasks)
        return
    # Not a multiprocessing.Pool: its workers are daemons, which may not start ranks.
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        yield from pool.map(_run_guarded, tasks)


if __name__ == "__main__":
    sys.exit(main())
