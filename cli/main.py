"""The entry point: runs one command, and the one place where an error or Ctrl-C becomes an exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .exit_codes import ExitCode
from .interrupts import Interrupted, interruptible, keyboard_interrupt

# Objects made until young ones are looked through, and how often older ones are: a search makes millions and frees most
# without help; at Python's own settings looking for garbage takes a tenth of it.
_GARBAGE_THRESHOLDS = (200_000, 20, 100)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Bad usage leaves through SystemExit, as typer does it."""
    try:
        with interruptible(), _rare_garbage_collection():
            return _run(arguments)
    except Interrupted:
        sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


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
        if (interrupt := keyboard_interrupt(end)) is not None:
            sys.stderr.write(f"interrupted{_place(interrupt)}\n")
        return end.code if isinstance(end.code, int) else ExitCode.DONE if end.code is None else ExitCode.BUG
    return ExitCode.DONE


def _place(interrupt: KeyboardInterrupt) -> str:
    """Where a model raised it: a Ctrl-C raises `Interrupted`."""
    if "torch" not in sys.modules:
        return ""
    from ..planner.capture.user_lines import raising

    where = raising(interrupt)
    return f": the model raised KeyboardInterrupt\n  where: {where}" if where else ""


if __name__ == "__main__":
    sys.exit(main())
