"""The entry point: runs one command, and the one place where an error or Ctrl-C becomes an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .exit_codes import ExitCode
from .interrupts import Interrupted, interruptible


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Bad usage leaves through SystemExit, as typer does it."""
    try:
        with interruptible():
            return _run(arguments)
    except Interrupted:
        sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    # Imported here, so that Ctrl-C ends a start too.
    from ..planner.errors import AutoparError
    from .app import app
    from .console import print_error

    try:
        app(args=None if arguments is None else list(arguments), prog_name="autopar")
    except AutoparError as error:
        print_error(error)
        return error.exit_code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.DONE if end.code is None else ExitCode.BUG
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
