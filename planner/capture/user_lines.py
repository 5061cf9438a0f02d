"""Lines of the user's program, as "file:line in function: code"."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from functools import cache
from pathlib import Path

import torch

TORCH = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
_OURS = (TORCH, HERE)
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
