"""The two streams: stdout carries the result and nothing else, stderr carries progress, notes and errors."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Protocol

from ..planner.errors import AutoparError
from ..planner.tables import Table

# Width of a table where stdout is no terminal: a file or a pipe.
_FILE_WIDTH = 140
_LINE_SECONDS = 2.0
# Of every --json answer but a plan's and a diff's, which have their own.
SCHEMA_VERSION = 1


class Progress(Protocol):
    """Called by the planner, the compiler and verify with one short line on what they do now."""

    def __call__(self, message: str, /) -> None: ...


class Unread(Exception):
    """What reads stdout has ended, as `head` does: nobody is left to tell."""


def print_result(text: str) -> None:
    """Write to stdout as it is, at once.

    Raises:
        Unread: nobody reads it.
        AutoparError: it cannot be written.
    """
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise Unread from error
    except OSError as error:
        raise unwritten(error) from error


def unwritten(error: OSError) -> AutoparError:
    """Why stdout ends here, such as a full disk."""
    return AutoparError(
        f"cannot write the result: {error.strerror}",
        where="standard output",
        fix="make room, or send it elsewhere; files that the command has written are complete",
    )


def print_json(data: Mapping[str, object]) -> None:
    """Write one JSON object to stdout, with its schema version first; what JSON cannot say (infinity) is null."""
    shown = {"schema_version": SCHEMA_VERSION, **data}
    print_result(json.dumps(_plain(shown), indent=2, allow_nan=False))


def _plain(value: object) -> object:
    """Records and containers as JSON data."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return value


def print_note(text: str) -> None:
    """Write one line to stderr; where that cannot be written, the result still can."""
    with suppress(OSError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def print_error(error: AutoparError) -> None:
    """Write what happened, where, and how to fix it to stderr."""
    print_note(f"error: {error}")


def print_table(table: Table) -> None:
    """Write a table to stdout, in the terminal's width, coloured only on a terminal (NO_COLOR is obeyed)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    if not console.is_terminal:
        console = Console(file=sys.stdout, highlight=False, width=_FILE_WIDTH)
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if table.is_numeric(index) else "left", overflow="fold")
    for row in table.rows:
        # Text: a name in brackets is no markup.
        shown.add_row(*(Text(cell) for cell in row))
    with console.capture() as captured:
        console.print(Text(table.title, style="bold"))
        console.print(shown)
    print_result("\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n\n")


@contextmanager
def progress(*, is_quiet: bool) -> Iterator[Progress]:
    """A spinner with the last message where stderr is a terminal, else a line now and then.

    What the code of a model prints meanwhile goes to stderr too: stdout is for the result.
    """
    with redirect_stdout(sys.stderr):
        if is_quiet:
            yield lambda message: None
        elif sys.stderr.isatty():
            from rich.console import Console

            with Console(file=sys.stderr).status("starting", spinner="line") as status:
                yield lambda message: status.update(message)
        else:
            yield _SparseLines()


@contextmanager
def progress_bar(title: str, *, is_quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Called with (steps done, of how many, the next): a bar where stderr is a terminal, else a line now and then."""
    if is_quiet:
        yield lambda done, total, what: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total, what: bar.update(
                task, completed=done, total=total, description=f"{title}: {what}"
            )
    else:
        say = _SparseLines()
        yield lambda done, total, what: say(f"{title} {done}/{total}: {what}")


class _SparseLines:
    """Prints the first message, and then one whenever the last is some seconds old."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, message: str, /) -> None:
        now = time.monotonic()
        if now - self._last >= _LINE_SECONDS:
            self._last = now
            print_note(message)
