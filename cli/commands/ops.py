"""autopar ops: which operations can be sharded."""

from __future__ import annotations

from typing import Annotated

import typer

from ..console import print_json, print_result


def ops(
    pattern: Annotated[str, typer.Argument(help="Only operations whose name holds this text.")] = "",
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the operations that have a sharding rule; any other is computed alike on every rank.

    autopar ops linear
    """
    from ...planner.sharding.rules import registered_ops

    names = [name for name in registered_ops() if pattern in name]
    if is_json:
        print_json({"ops": names})
    else:
        print_result("\n".join(names) if names else f"no operation with a rule holds {pattern!r}")
