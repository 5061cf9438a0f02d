"""autopar graph: work, depth and a picture of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ...cost_models.units import format_flops
from ...planner.errors import AutoparError
from ..console import print_result, progress
from ..options import parse_assignments


def graph(
    model: Annotated[str, typer.Argument(metavar="MODEL.py[:NAME]", help="The file that builds the module.")],
    gpus: Annotated[int, typer.Option(min=1, help="p of the bounds.")] = 8,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step; else as the model file has them.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Argument of the model; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="NAME=DTYPE[SIZES]", help="ids=int64[B,1024]; repeatable.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="A .svg or .html picture of the graph.")
    ] = None,
    is_forced: Annotated[bool, typer.Option("--force", help="Replace a picture that is there already.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Print work, depth and the bounds on p GPUs, and draw the graph with repeated blocks folded.

    autopar graph model.py --gpus 8 --out graph.html
    """
    raise NotImplementedError
