"""Models that broke other tools, on small meshes and on the free plan: plan, emit, verify; a table of what came of it.

    python benchmarks/cases.py tests/cases/reports --only lstm_gru,weight_norm --jobs 2
    python benchmarks/cases.py tests/cases/hf.py --set arch=llama --set arch=gpt2 --mesh "dp=2;tp=2"

Each model is captured once and then planned and verified per mesh. Three outcomes: verified; refused, with the reason
(no plan fits, or the model is not supported); WRONG, which is anything else: values or collectives that differ, a
crash, no answer in time. Exit code 5 if anything is WRONG. Models run in forks of a process that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from math import prod
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parent.parent / "tests" / "cases" / "reports"
FREE_GPUS = 8
MESHES = "dp=2;tp=2;pp=2;dp=2,tp=2;dp=2,tp=2,pp=2;free"
STATUSES = ("verified", "refused", "WRONG")
EXIT_WRONG = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model with its arguments ("arch=llama"), and the meshes to try, as text; "free" leaves all to the search."""

    model: str
    arguments: tuple[str, ...]
    meshes: tuple[str, ...]
    timeout_seconds: float

    @property
    def name(self) -> str:
        return " ".join((Path(self.model).stem, *(text.partition("=")[2] for text in self.arguments)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`detail` is the reason of a refusal or the first difference."""

    model: str
    mesh: str
    status: str
    plan: str = ""
    exit_code: int = 0
    worst_relative_error: float | None = None
    collectives: int = 0
    seconds: float = 0.0
    detail: str = ""


def run_task(task: Task) -> Iterator[Row]:
    """A row for every mesh of the task."""
    from autopar.cli.options import parse_assignments
    from autopar.cost_models.errors import AutoparError
    from autopar.planner.driver import PlanRequest, capture

    request = PlanRequest(model=task.model, gpus=FREE_GPUS, arguments=parse_assignments(task.arguments, option="--set"))
    try:
        graph, request = capture(request)
    except AutoparError as error:
        yield from (_refused(task, mesh, error) for mesh in task.meshes)
        return
    except Exception as error:  # a crash is a row of the table, not its end
        yield from (_crashed(task, mesh, error) for mesh in task.meshes)
        return
    for mesh in task.meshes:
        begin = time.monotonic()
        try:
            row = _run_mesh(task, mesh, graph, request)
        except AutoparError as error:
            row = _refused(task, mesh, error)
        except Exception as error:
            row = _crashed(task, mesh, error)
        yield replace(row, seconds=time.monotonic() - begin)


def _run_mesh(task: Task, mesh: str, graph: Any, request: Any) -> Row:
    from autopar.compiler.package import emit_package
    from autopar.compiler.verify import verify
    from autopar.planner.driver import check_request, plan_graph
    from autopar.planner.replay import parse_mesh

    sizes = {"dp": 1, "tp": 1, "pp": 1, **parse_mesh(mesh, where=mesh)} if mesh != "free" else {}
    request = replace(request, gpus=prod(sizes.values()) if sizes else FREE_GPUS, mesh=sizes)
    plan = plan_graph(graph, request, check_request(request)).plan
    shape = ",".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1)
    how = f"{shape} m={plan.microbatches} {plan.schedule} zero={plan.zero} ac={plan.activation_checkpoint}"
    with tempfile.TemporaryDirectory(prefix="autopar-cases-") as folder:
        package = Path(folder, "package")
        emit_package(plan, graph, package, force=False)
        report = verify(plan, package, graph=graph, timeout_seconds=task.timeout_seconds)
    wrong = [line.strip() for line in report.lines() if line.startswith(("FAILED", "  ", "values differ"))]
    return Row(
        model=task.name,
        mesh=mesh,
        plan=how,
        status="verified" if report.ok else "WRONG",
        exit_code=0 if report.ok else EXIT_WRONG,
        worst_relative_error=report.worst_relative_error if report.worst else None,
        collectives=report.collectives,
        detail="; ".join(wrong[:3]),
    )


def _refused(task: Task, mesh: str, error: Exception) -> Row:
    code = getattr(error, "exit_code", 1)
    status = "WRONG" if code == EXIT_WRONG else "refused"
    return Row(model=task.name, mesh=mesh, status=status, exit_code=code, detail=" ".join(str(error).split()))


def _crashed(task: Task, mesh: str, error: Exception) -> Row:
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__}: {' '.join(str(error).split())} ({Path(place.filename).name}:{place.lineno})"
    return Row(model=task.name, mesh=mesh, status="WRONG", exit_code=1, detail=what)


def _serve(channel: Connection) -> None:
    """A worker: rows for every task that comes, None after the last of each."""
    os.setpgid(0, 0)  # whatever it forks dies with it
    while (task := channel.recv()) is not None:
        for row in run_task(task):
            channel.send(row)
        channel.send(None)


class _Worker:
    """A forked process, its current task and how many of its rows are there."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.channel, theirs = context.Pipe()
        # Not a daemon: it starts ranks.
        self.process = context.Process(target=_serve, args=(theirs,))
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.done = 0
        self.deadline = 0.0

    def give(self, task: Task) -> None:
        self.task, self.done = task, 0
        self.channel.send(task)
        self.wind()

    def wind(self) -> None:
        assert self.task is not None
        # Verify keeps its own limit; the search, which has none, gets as much again.
        self.deadline = time.monotonic() + 2 * self.task.timeout_seconds

    def stop(self) -> None:
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.join()


def run_tasks(tasks: list[Task], jobs: int) -> Iterator[Row]:
    """All rows, as they come; a worker that dies or gives no row in time makes the next mesh of its task WRONG."""
    waiting = list(tasks)
    workers = [_Worker() for _ in range(min(jobs, len(tasks)))]
    try:
        while True:
            for worker in workers:
                if worker.task is None and waiting:
                    worker.give(waiting.pop(0))
            busy = {worker.channel: worker for worker in workers if worker.task is not None}
            if not busy:
                return
            for channel in wait(list(busy), timeout=1.0):
                worker = busy[channel]
                try:
                    row = worker.channel.recv()
                except EOFError:
                    yield _lost(workers, worker, waiting, "the process died")
                    continue
                if row is None:
                    worker.task = None
                    continue
                worker.done += 1
                worker.wind()
                yield row
            for worker in [w for w in workers if w.task is not None and time.monotonic() > w.deadline]:
                yield _lost(workers, worker, waiting, "no answer in time")
    finally:
        for worker in workers:
            worker.stop()


def _lost(workers: list[_Worker], worker: _Worker, waiting: list[Task], what: str) -> Row:
    """Replace a worker; the meshes that its task still had go back to the front of the queue."""
    task = worker.task
    assert task is not None
    mesh, rest = task.meshes[worker.done], task.meshes[worker.done + 1 :]
    if rest:
        waiting.insert(0, replace(task, meshes=rest))
    worker.stop()
    workers[workers.index(worker)] = _Worker()
    return Row(model=task.name, mesh=mesh, status="WRONG", exit_code=1, detail=what)


def table_line(row: Row) -> str:
    error = "-" if row.worst_relative_error is None else f"{row.worst_relative_error:.1e}"
    line = f"{row.model:<26}{row.mesh:<16}{row.status:<9}{row.exit_code:>5}{error:>9}{row.collectives:>7}"
    return f"{line}{row.seconds:>8.1f}  {row.plan or row.detail}{'  ' + row.detail if row.plan else ''}".rstrip()


def summary_lines(rows: list[Row], meshes: tuple[str, ...]) -> Iterator[str]:
    """One line a model: what came of each mesh."""
    yield f"{'model':<26}" + "".join(f"{mesh:<16}" for mesh in meshes)
    for model in dict.fromkeys(row.model for row in rows):
        cells = {row.mesh: row for row in rows if row.model == model}
        yield f"{model:<26}" + "".join(f"{_cell(cells.get(mesh)):<16}" for mesh in meshes)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"refused ({row.exit_code})" if row.status == "refused" else row.status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="?", type=Path, default=REPORTS, help="a folder of model files, or one file")
    parser.add_argument("--only", default="", help="names of files in the folder, separated by commas")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="one row of models for each")
    parser.add_argument("--mesh", default=MESHES, help="separated by semicolons; free: 8 ranks, all left to the search")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time")
    parser.add_argument("--timeout-seconds", type=float, default=300.0, help="for each verification")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    files = [arguments.models] if arguments.models.is_file() else sorted(arguments.models.glob("*.py"))
    wanted = [name for name in arguments.only.split(",") if name]
    if unknown := sorted(set(wanted) - {file.stem for file in files}):
        parser.error(f"no such model: {', '.join(unknown)}; there are {', '.join(file.stem for file in files)}")
    meshes = tuple(mesh.strip() for mesh in arguments.mesh.split(";") if mesh.strip())
    tasks = [
        Task(
            model=str(file),
            arguments=(value,) if value else (),
            meshes=meshes,
            timeout_seconds=arguments.timeout_seconds,
        )
        for file in files
        if not wanted or file.stem in wanted
        for value in arguments.set or [""]
    ]
    if not tasks:
        parser.error(f"no model files in {arguments.models}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import autopar.compiler.package
    import autopar.compiler.verify
    import autopar.planner.driver  # noqa: F401  imported once, before the fork
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    for row in run_tasks(tasks, arguments.jobs):
        rows.append(row)
        print(table_line(row), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    counts = {status: sum(row.status == status for row in rows) for status in STATUSES}
    if arguments.json:
        print(json.dumps({"schema_version": 1, "counts": counts, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print("", *summary_lines(rows, meshes), ", ".join(f"{n} {status}" for status, n in counts.items()), sep="\n")
    return EXIT_WRONG if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
