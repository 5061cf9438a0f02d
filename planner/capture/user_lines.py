"""Lines of the user's program, as "file:line in function: code"."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
import traceback
from collections import Counter
from functools import cache
from pathlib import Path

import torch

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
_PACKAGES = (str(Path(__file__).parents[2] / name) for name in ("cli", "compiler", "cost_models", "planner"))
_OURS = (TORCH, *_PACKAGES)
_PYTHON = sysconfig.get_path("stdlib")
_CALLER = str(Path(__file__).parent / "step.py")  # calls the user's program
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)')


@cache
def line(file: str, number: int, function: str) -> str:
    """One line of a file."""
    return f"{Path(file).name}:{number} in {function}: {linecache.getline(file, number).strip()}"


def in_stack_trace(stack: str) -> str:
    """The innermost line of the user's code in the text of a stack trace; "" where there is none."""
    found = [match for match in _FRAME.finditer(stack) if not match["file"].startswith(_OURS)]
    if not found:
        return ""
    last = found[-1]
    return line(last["file"], int(last["line"]), last["function"])


def in_frames(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's code in an extracted stack; "" where there is none."""
    ours = [f for f in frames if not f.filename.startswith(_OURS) and f.lineno is not None]
    return line(ours[-1].filename, ours[-1].lineno or 0, ours[-1].name) if ours else ""


def raising(error: BaseException) -> str:
    """The innermost line of the user's, or of a library that is not torch, that an error came through; "" for none."""
    return in_frames(traceback.StackSummary.from_list([f for f in _frames(error) if _is_theirs(f.filename)]))


def calling_itself(error: RecursionError) -> str:
    """The line by which a function, none of torch or of Python, calls itself so often; "" where there is none."""
    lines = Counter((f.filename, f.lineno, f.name) for f in _frames(error) if _is_theirs(f.filename))
    if not lines:
        return ""
    (file, number, name), count = lines.most_common(1)[0]
    return line(file, number or 0, name) if count > 1 else ""


def _frames(error: BaseException) -> traceback.StackSummary:
    return traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)


def _is_theirs(file: str) -> bool:
    is_python = file.startswith(("<", _PYTHON)) and "site-packages" not in file
    return not is_python and not file.startswith(_OURS)


def running() -> str:
    """The innermost line of a `forward` of the user's that is running now; "" for none.

    Of functions that forward calls, torch.export tells the line that calls them. So does this.
    """
    frame = sys._getframe(1)
    while frame is not None and (file := frame.f_code.co_filename) != _CALLER:
        if frame.f_code.co_name == "forward" and not file.startswith(_OURS):
            return line(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""
