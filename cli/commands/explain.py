"""autopar explain: say why a plan is what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...planner import explain as words
from ...planner.plan_json import read_plan
from ..console import print_json, print_result, print_table


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json.")],
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say where time and memory go, what binds, and why the runner-ups lost.

    autopar explain gpt-autopar/plan.json
    """
    plan = read_plan(plan_file)
    sentences = words.explanations(plan)
    if is_json:
        data = {
            "decision": words.decision_line(plan),
            "solver": words.solver_line(plan),
            "explanations": list(sentences),
        }
        print_json(data)
        return
    print_result(f"{words.decision_line(plan)}\n{words.setting_line(plan)}\n{words.prediction_line(plan)}\n\n")
    for table in (
        words.stage_table(plan),
        words.time_table(plan),
        words.memory_table(plan),
        words.communication_table(plan),
        words.runner_up_table(plan),
    ):
        if table.rows:
            print_table(table)
    print_result("\n".join([*sentences, words.solver_line(plan)]))
