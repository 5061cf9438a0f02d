"""autopar verify: run the emitted code on CPU ranks against the user's module."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ...planner.errors import AutoparError, CheckFailed
from ...planner.plan import Plan
from ...planner.plan_json import read_plan, relative_to
from ..console import print_json, print_result, progress
from ..options import parse_assignments

MODULE_FILE = "sharded_model.py"


class Dtype(Enum):
    AUTO = "auto"
    FLOAT64 = "float64"
    FLOAT32 = "float32"


def verify(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or the folder that holds it.")],
    is_shrunk: Annotated[
        bool, typer.Option("--shrink", help="Each mesh axis at most 2, same schedule and policies.")
    ] = False,
    arguments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With --shrink: argument of a smaller model; repeatable."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of weights and values; auto: float64 where the model allows.")
    ] = Dtype.AUTO,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Give up after this.")] = 600,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_verbose: Annotated[bool, typer.Option("--verbose", "-v", help="List every difference.")] = False,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Run the emitted module on CPU ranks and compare loss, gradients, updates and collectives with the original.

    autopar verify gpt-autopar/plan.json
    """
    file = plan_file / "plan.json" if plan_file.is_dir() else plan_file
    set_values = parse_assignments(arguments or (), option="--set")
    if set_values and not is_shrunk:
        raise AutoparError("--set changes the model, so the plan is of another one", fix="give --shrink too")
    plan = read_plan(file)
    with progress(is_quiet=is_quiet) as report, tempfile.TemporaryDirectory(prefix="autopar-") as scratch:
        package = file.parent
        if not is_shrunk and not (package / MODULE_FILE).is_file():
            package = Path(scratch) / "package"
            report(f"writing the package of {file}")
            _emit(plan, package)
        ranks = "shrunk ranks" if is_shrunk else f"{plan.gpus} CPU ranks"
        report(f"running the original and {ranks}")
        from ...compiler.verify import verify as run_verify

        found = run_verify(
            plan,
            package,
            shrink=is_shrunk,
            arguments=set_values,
            dtype=dtype.value,
            timeout_seconds=timeout_seconds,
        )
    if is_json:
        print_json({"ok": found.ok, **asdict(found)})
    else:
        print_result("\n".join(found.lines(verbose=is_verbose)))
    if found.failure is not None and not found.failure.traceback:
        raise CheckFailed(
            f"not verified: {found.failure.error}",
            where=str(file),
            fix="give it more time with --timeout-seconds, or run it on fewer ranks with --shrink",
        )
    if found.num_values and found.mismatches and not (found.bad_values or found.failure):
        raise CheckFailed(
            "all values are those of the original, but other collectives run than the plan lists",
            where=str(file),
            fix=f"write the package of the plan as it is now, and its list anew: "
            f"autopar emit {shlex.quote(str(file))} --force",
        )
    if not found.ok:
        raise CheckFailed(
            "the emitted module does not do what the original does",
            where=str(package if package == file.parent else file),
            fix="report it with this plan.json; --verbose lists every difference",
        )


def _emit(plan: Plan, package: Path) -> None:
    from ...compiler.package import emit_package
    from ...planner.replay import graph_of

    emit_package(relative_to(plan, package), graph_of(plan), package, force=False)
