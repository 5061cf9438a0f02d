"""autopar ops: which operations can be sharded."""

from __future__ import annotations

from typing import Annotated

import typer

from ..console import print_json, print_result


def ops(
    pattern: Annotated[str, typer.Argument(metavar="TEXT", help="Only operations whose name holds this text.")] = "",
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the operations that have a sharding rule; any other is computed alike on every rank.

    Operations that compute element by element have one without being listed: name them to see.

    autopar ops linear
    """
    from ...planner.sharding.rules import ops_holding

    names = list(ops_holding(pattern))
    if is_json:
        print_json({"ops": names})
    else:
        print_result("\n".join(names))
