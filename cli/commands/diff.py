"""autopar diff: compare two plans."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ...planner.diff import diff_plans, diff_to_json
from ...planner.diff_tables import diff_tables, diff_to_markdown, headline
from ...planner.fail_on import check_fail_on, parse_fail_on
from ...planner.plan_json import read_plan
from ..console import print_result, print_table


class Format(Enum):
    TERMINAL = "terminal"
    MARKDOWN = "markdown"
    JSON = "json"


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="plan.json before.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="plan.json after.")],
    output_format: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TERMINAL,
    is_json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    fail_on: Annotated[
        str, typer.Option(metavar="RULES", help='Exit with code 5 where this holds: "step_time>5%,memory>2%,mesh".')
    ] = "",
) -> None:
    """Compare two plans by meaning: mesh, schedule, stages, parameters, operations, predictions.

    autopar diff main/plan.json plan.json --format markdown --fail-on "step_time>5%,memory>2%,mesh"
    """
    rules = parse_fail_on(fail_on) if fail_on else ()
    found = diff_plans(read_plan(old), read_plan(new))
    if is_json or output_format is Format.JSON:
        print_result(diff_to_json(found))
    elif output_format is Format.MARKDOWN:
        print_result(diff_to_markdown(found, old=str(old), new=str(new)))
    else:
        print_result(headline(found))
        for table in () if found.is_empty else diff_tables(found):
            print_table(table)
    check_fail_on(found, rules)
