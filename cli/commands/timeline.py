"""autopar timeline: draw the simulated step of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cost_models.units import format_seconds
from ...planner.errors import AutoparError
from ...planner.plan_json import read_plan
from ...planner.timeline import chrome_trace, parse_slow, simulate_plan
from ...planner.timeline_page import timeline_page
from ..console import print_json, print_result


def timeline(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json.")],
    slow: Annotated[
        list[str] | None, typer.Option(metavar="rank=R:F", help="Rank R takes F times as long; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where timeline.json and timeline.html go: beside the plan.")
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; files only with --out.")] = False,
) -> None:
    """Simulate a step and draw it: a trace for ui.perfetto.dev and an HTML page; what stragglers cost.

    autopar timeline gpt-autopar/plan.json --slow rank=3:1.3
    """
    plan = read_plan(plan_file)
    factors = parse_slow(slow or (), plan.gpus)
    usual = simulate_plan(plan)
    shown = simulate_plan(plan, factors) if factors else usual
    steps = [("as planned", usual)]
    if factors:
        told = ", ".join(f"rank {rank} x {factor:g}" for rank, factor in sorted(factors.items()))
        steps.append((told, shown))
    files: dict[str, str] = {}
    if out is not None or not is_json:
        folder = plan_file.parent if out is None else out
        files = {
            str(folder / "timeline.json"): chrome_trace(plan, shown),
            str(folder / "timeline.html"): timeline_page(plan, steps),
        }
        _write(folder, files)
    if is_json:
        data = {
            "step_seconds": usual.step_seconds,
            "bubble_fraction": usual.bubble_fraction,
            "slow": {str(rank): factor for rank, factor in sorted(factors.items())},
            "slowed_step_seconds": shown.step_seconds,
            "slowed_bubble_fraction": shown.bubble_fraction,
            "files": list(files),
        }
        print_json(data)
        return
    for title, step in steps:
        print_result(f"{title}: {format_seconds(step.step_seconds)}, {100 * step.bubble_fraction:.1f}% in bubbles")
    if factors and usual.step_seconds:
        print_result(f"slower by {100 * (shown.step_seconds / usual.step_seconds - 1):.1f}%")
    print_result(f"wrote {' and '.join(files)}")


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            Path(name).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise AutoparError(
            f"cannot write to {folder}: {error.strerror}", fix="choose another folder with --out"
        ) from error
