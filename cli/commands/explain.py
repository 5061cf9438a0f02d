"""autopar explain: say why a plan is what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...planner import plan_tables, summary
from ...planner.explain import comparison, explanations
from ...planner.gradient_sync import gradient_sync_table
from ...planner.plan_json import read_plan
from ..console import print_json, print_result, print_table, progress


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json.")],
    against: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="Another plan of the same step: say why it is slower or faster.")
    ] = None,
    has_what_if: Annotated[
        bool, typer.Option("--what-if", help="Plan again with more memory, a faster network and a larger batch.")
    ] = False,
    has_gradient_sync: Annotated[
        bool, typer.Option("--gradient-sync", help="Compare ways to add up gradients on the plan's cluster.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Say where time and memory go, what binds, why the runner-ups lost, and what would change the answer.

    autopar explain gpt-autopar/plan.json --what-if
    """
    plan = read_plan(plan_file)
    sentences = explanations(plan)
    if against is not None:
        sentences += (comparison(plan, read_plan(against)),)
    if has_what_if:
        from ...planner.what_if import what_if

        with progress(is_quiet=is_quiet) as report:
            sentences += tuple(found.sentence(plan) for found in what_if(plan, report))
    sync = gradient_sync_table(plan) if has_gradient_sync else None
    if is_json:
        data = {
            "decision": summary.decision_line(plan),
            "solver": summary.solver_line(plan),
            "explanations": list(sentences),
        }
        if sync is not None:
            data["gradient_sync"] = [": ".join(row) for row in sync.rows]
        print_json(data)
        return
    print_result(f"{summary.decision_line(plan)}\n{summary.setting_line(plan)}\n{summary.prediction_line(plan)}\n\n")
    for table in (
        plan_tables.stage_table(plan),
        plan_tables.time_table(plan),
        plan_tables.memory_table(plan),
        plan_tables.communication_table(plan),
        plan_tables.runner_up_table(plan),
        sync,
    ):
        if table is not None and table.rows:
            print_table(table)
    print_result("\n".join([*sentences, summary.solver_line(plan)]))
