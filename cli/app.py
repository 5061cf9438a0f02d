"""The command line: one typer app, one file per command."""

from __future__ import annotations

import typer

from .commands import diff, emit, explain, graph, hardware, ops, plan, timeline, verify
from .console import print_result

app = typer.Typer(
    name="autopar",
    help="Plan, write and verify a sharded PyTorch module.\n\nautopar plan model.py --gpus 8",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from importlib.metadata import version

        print_result(f"autopar {version('autopar')}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Plan, write and verify a sharded PyTorch module.

    autopar plan model.py --gpus 8
    """


app.command("plan", short_help="Find the fastest plan and write the sharded module.")(plan.plan)
app.command("emit", short_help="Write the package of a plan again.")(emit.emit)
app.command("verify", short_help="Run the written code on CPU ranks against the original.")(verify.verify)
app.command("diff", short_help="Compare two plans by meaning.")(diff.diff)
app.command("graph", short_help="Print work, depth and bounds of a model; draw it.")(graph.graph)
app.command("explain", short_help="Say where a plan's time and memory go.")(explain.explain)
app.command("timeline", short_help="Draw the simulated step of a plan.")(timeline.timeline)
app.add_typer(hardware.app, name="hardware")
app.command("ops", short_help="List the operations that can be sharded.")(ops.ops)
