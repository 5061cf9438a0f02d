"""The entry point: runs one command, and the one place where an error or Ctrl-C becomes an exit code."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from .exit_codes import ExitCode
from .interrupts import Interrupted, interruptible, made_of

# Objects made until young ones are looked through, and how often older ones are: a search makes millions and frees most
# without help; at Python's own settings looking for garbage takes a tenth of it.
_GARBAGE_THRESHOLDS = (1_000_000, 20, 100)


_STREAM_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def program() -> int:
    """`main` as a process of its own, which ends at once: to free what a search has made takes it seconds."""
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    # None where the shell has closed them (`>&-`): to nobody, then.
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    codes: list[int] = []
    # What is registered first is called last, when all threads and all others who want to tidy up are done.
    atexit.register(lambda: _leave(*codes) if codes else None)
    codes.append(main())
    return codes[0]


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the code says so already
            stream.flush()
    os._exit(code)


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
    from .console import Unread, print_error, print_note, unwritten

    try:
        app(args=None if arguments is None else list(arguments), prog_name="autopar")
    except AutoparError as error:
        print_error(error)
        return error.exit_code
    except Unread:
        return ExitCode.UNREAD
    except OSError as error:  # of what typer prints itself, such as --help
        if error.errno not in _STREAM_ERRORS or error.filename is not None:
            raise
        print_error(unwritten(error))
        return ExitCode.USAGE
    except SystemExit as end:
        if made_of(end, BrokenPipeError) is not None:
            return ExitCode.UNREAD
        if (interrupt := made_of(end, KeyboardInterrupt)) is not None:
            print_note(f"interrupted{_place(interrupt)}")
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
    sys.exit(program())
