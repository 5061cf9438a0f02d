"""Ctrl-C ends a command at any moment: what it holds is cleaned up, one line is printed, the exit code is 130.

Python runs a signal's handler in the main thread, between two of its own instructions: a solver or another long call
into a library is not interrupted. So a thread hears of the signal too. Where the main thread has not come to its end
some seconds later, the thread cleans up what is registered to be cleaned at exit and ends the process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from .exit_codes import ExitCode

_PATIENCE_SECONDS = 3.0
_Error = TypeVar("_Error", bound=BaseException)


class Interrupted(BaseException):
    """Ctrl-C; no `KeyboardInterrupt`, which typer and models may catch."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` on Ctrl-C, and end the process if that does not help.

    Nothing changes outside the main thread, or where Ctrl-C is ignored (as in `nohup ... &`).
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    heard, speaking = os.pipe()
    os.set_blocking(speaking, False)
    is_over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(heard, is_over), daemon=True)
    watcher.start()
    before = signal.signal(signal.SIGINT, _raise)
    woken = signal.set_wakeup_fd(speaking, warn_on_full_buffer=False)
    try:
        yield
    finally:
        is_over.set()
        signal.signal(signal.SIGINT, before)
        signal.set_wakeup_fd(woken)
        os.close(speaking)
        watcher.join()
        os.close(heard)


def made_of(end: SystemExit, kind: type[_Error]) -> _Error | None:
    """The exception of a kind that typer has made this end of, None if there was none."""
    error: BaseException | None = end
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def _raise(number: int, frame: object) -> None:
    raise Interrupted


def _watch(heard: int, is_over: threading.Event) -> None:
    """Wait for the signal, and then for the main thread."""
    while heard_of := os.read(heard, 1):
        if heard_of[0] == signal.SIGINT and not is_over.wait(_PATIENCE_SECONDS):
            _end()


def _end() -> None:
    """End the process from beside the main thread, which is deep in a library."""
    with suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
        # Scratch folders among others; nobody else will run them.
        atexit._run_exitfuncs()  # pyright: ignore
    is_terminal = sys.stderr.isatty()
    sys.stderr.write("\x1b[?25h\ninterrupted\n" if is_terminal else "interrupted\n")  # a spinner hides the cursor
    sys.stderr.flush()
    os._exit(ExitCode.INTERRUPTED)


__all__ = ["Interrupted", "interruptible", "made_of"]
