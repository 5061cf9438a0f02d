"""Forks processes that never hang: a hard time limit, and the first that fails ends the others.

Ranks are forked from a fork server that has imported torch and nothing else: a process that once ran autograd cannot be
forked safely (its children hang in the backward), and the caller may have. The server starts once per process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from ..interrupts import interrupts_held
from .report import RankFailure

_POLL_SECONDS = 0.5
_GRACE_SECONDS = 0.2  # for a rank that has answered to end
# Imported once, by the fork server; a rank then starts in milliseconds.
_PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    f"{__package__}.rank",
    f"{__package__}.reference",
)


def _entry(function: Callable[..., object], arguments: tuple[object, ...], result: Connection) -> None:
    # Its own process group: whatever it forks dies with it.
    os.setpgid(0, 0)
    os.dup2(2, 1)  # what the model prints is no part of the answer of the command
    try:
        answer: tuple[str, object] = ("ok", function(*arguments))
    except BaseException as error:  # the parent reports it, whatever it is
        text = str(error).strip() or repr(error)
        answer = ("error", (f"{type(error).__name__}: {text}", traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):  # the parent has heard enough from another rank
        result.send(answer)
    result.close()


def _started_context() -> Any:
    """Processes of a fork server that is ready.

    Ctrl-C reaches every process of the terminal: the server and what it forks have it blocked, for this process ends
    them. Waiting for the server to be ready can be interrupted; starting ranks is quick then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOAD))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    first = context.Process(target=_nothing, daemon=True)
    first.start()
    first.join()
    return context


def _nothing() -> None:
    pass


def run_ranks(
    function: Callable[..., object], arguments: Sequence[tuple[object, ...]], *, timeout_seconds: float
) -> tuple[list[object], RankFailure | None]:
    """Run `function(*arguments[i])` in process i, all at once; (results, None) or ([], the failure).

    `function` is importable by name. A process that dies without a word, or the time limit, is a failure too.
    """
    # Forked children share two or three cores: one thread each, also for whatever reads the environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = _started_context()
    processes: list[Any] = []
    ends: list[Connection] = []
    is_done = False
    try:
        with interrupts_held():
            for argument in arguments:
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_entry, args=(function, tuple(argument), theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(mine)
        found = _collect(processes, ends, time.monotonic() + timeout_seconds, timeout_seconds)
        is_done = found[1] is None
        return found
    finally:
        _end(processes, grace_seconds=_GRACE_SECONDS if is_done else 0.0)
        for end in ends:
            end.close()


def _collect(
    processes: Sequence[Any], ends: Sequence[Connection], deadline: float, timeout_seconds: float
) -> tuple[list[object], RankFailure | None]:
    results: dict[int, object] = {}
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        if time.monotonic() > deadline:
            late = ", ".join(str(rank) for rank in sorted(waiting.values()))
            what = f"no answer from rank {late} within {timeout_seconds:.0f} seconds"
            return [], RankFailure(rank=min(waiting.values()), error=what, traceback="")
        for end in wait(list(waiting), timeout=_POLL_SECONDS):
            assert isinstance(end, Connection)
            rank = waiting.pop(end)
            try:
                status, answer = end.recv()
            except EOFError:
                processes[rank].join(_POLL_SECONDS)
                what = f"the process died (exit code {processes[rank].exitcode})"
                return [], RankFailure(rank=rank, error=what, traceback="")
            if status != "ok":
                error, text = answer
                return [], RankFailure(rank=rank, error=error, traceback=text)
            results[rank] = answer
    return [results[rank] for rank in range(len(ends))], None


def _end(processes: Sequence[Any], *, grace_seconds: float) -> None:
    """End the processes that have not ended by themselves, with whatever they forked."""
    for process in processes:
        process.join(grace_seconds)
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()  # it has not yet made its group
    for process in alive:
        process.join()
