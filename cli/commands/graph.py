"""autopar graph: work, depth and a picture of the model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...cost_models.hardware import load_cluster
from ...cost_models.stacks import load_stack
from ...planner.errors import AutoparError
from ..console import print_json, print_note, print_result, print_table, progress
from ..options import ExactCapture, parse_assignments

if TYPE_CHECKING:
    from ...planner.capture.analysis import WorkDepth

SUFFIXES = (".svg", ".html")


def graph(
    model: Annotated[str, typer.Argument(metavar="MODEL.py[:NAME]", help="The file that builds the module.")],
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs the bounds are for (p).")] = 8,
    cluster: Annotated[str, typer.Option(help="Catalogue name or TOML file; its GPU gives the times.")] = "h100-sxm",
    stack: Annotated[str, typer.Option(help="Software stack that the times are of.")] = "eager",
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step; else as the model file has them.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Argument of the model; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=DTYPE[SIZES]", help="An input: ids=int64[B,1024], B the batch; may be repeated."
        ),
    ] = None,
    is_exact_capture: ExactCapture = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="A .svg or .html picture of the graph.")
    ] = None,
    is_forced: Annotated[bool, typer.Option("--force", help="Replace a picture that is there already.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and notes on stderr.")] = False,
) -> None:
    """Print work, depth and the bounds on p GPUs, and draw the graph with repeated blocks folded.

    autopar graph model.py --gpus 8 --out graph.html
    """
    set_values = parse_assignments(arguments or (), option="--set")
    input_texts = parse_assignments(inputs or (), option="--input")
    gpu, software = load_cluster(cluster).gpu, load_stack(stack)
    if out is not None:
        _check_picture(out, is_forced=is_forced)
    from ...planner.driver import PlanRequest, capture
    from ...planner.work_depth import analyse_step, work_depth_table

    with progress(is_quiet=is_quiet) as report:
        report(f"capturing {model}")
        request = PlanRequest(
            model=model,
            gpus=gpus,
            arguments=set_values,
            inputs=input_texts,
            cluster=cluster,
            batch_size=batch_size,
            exact_capture=is_exact_capture,
        )
        captured, _ = capture(request)
        found = analyse_step(captured, gpu, software)
    table = work_depth_table(found, gpu, gpus)
    if out is not None:
        from ...planner.capture.drawing import draw_html, draw_svg

        draw = draw_svg if out.suffix == ".svg" else draw_html
        _write(out, draw(captured, lines=[f"{name.strip()}: {flops}, {time}" for name, flops, time in table.rows]))
        if not is_quiet:
            print_note(f"written: {out}")
    if is_json:
        print_json(
            {
                "model": captured.name,
                "batch_size": captured.batch_size,
                "num_operations": found.num_operations,
                "num_folded_operations": found.num_folded_operations,
                "flops": _numbers(found.flops, gpus),
                "seconds": _numbers(found.seconds, gpus),
                "notes": captured.notes,
            }
        )
        return
    print_result(
        f"{captured.name}: batch {captured.batch_size}, {found.num_operations} operations, "
        f"{found.num_folded_operations} after folding repeated blocks"
    )
    print_table(table)
    for note in captured.notes:
        print_result(f"note: {note}")


def _numbers(found: WorkDepth, gpus: int) -> dict[str, object]:
    low, high = found.brent_bounds(gpus)
    return {
        **asdict(found),
        "work": found.work,
        "depth": found.depth,
        "average_parallelism": found.average_parallelism,
        "brent_low": low,
        "brent_high": high,
    }


def _check_picture(out: Path, *, is_forced: bool) -> None:
    if out.suffix not in SUFFIXES:
        raise AutoparError(
            f"cannot draw a {out.suffix or 'file without suffix'}", where=str(out), fix="use .svg or .html"
        )
    if out.exists() and not is_forced:
        raise AutoparError("the picture is there already", where=str(out), fix="choose another file, or add --force")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(
            f"cannot write the picture: {error.strerror}", where=str(out), fix="choose another file with --out"
        ) from error
