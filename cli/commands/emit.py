"""autopar emit: write the package of a plan, and what follows from its edits into the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...planner.plan_json import read_plan, relative_to
from ...planner.summary import repriced_line
from ..console import print_json, print_note, print_result, progress


def emit(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, edited by hand or not.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Default: the folder of PLAN.")] = None,
    is_forced: Annotated[bool, typer.Option("--force", help="Replace a package that is there already.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Write the sharded module of a plan again, and predictions and collectives of a plan that was edited.

    autopar emit gpt-autopar/plan.json --force
    """
    plan = read_plan(plan_file)
    folder = out or plan_file.parent
    from ...compiler.package import after_edits, check_folder, emit_package
    from ...planner.replay import graph_of

    check_folder(folder, force=is_forced)
    with progress(is_quiet=is_quiet) as report:
        report(f"capturing {plan.model.path}")
        graph = graph_of(plan)
        report("pricing the plan")
        found = after_edits(plan, graph)
        files = emit_package(relative_to(found, folder), graph, folder, force=is_forced, progress=report)
    if found is not plan and not is_quiet:
        print_note(f"priced again: {repriced_line(plan, found)}")
    names = sorted(str(file) for file in files)
    if is_json:
        print_json({"files": names})
    else:
        print_result("\n".join(names))
