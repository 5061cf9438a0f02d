"""Options that are small languages of their own: key=value pairs, meshes, the model argument."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..planner.errors import AutoparError

AXES = ("dp", "tp", "pp")


def parse_assignments(items: Iterable[str], *, option: str) -> dict[str, str]:
    """Read ["width=64", "preset=tiny"] into a mapping; values stay text.

    Raises:
        AutoparError: no "=", no key, or a key given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        key, is_assigned, value = item.partition("=")
        key = key.strip()
        if not is_assigned or not key.isidentifier():
            raise AutoparError(f"cannot read {item!r}", where=option, fix=f"write {option} key=value")
        if key in found:
            raise AutoparError(f"{key} is given twice", where=option, fix=f"keep one {option} {key}=...")
        found[key] = value.strip()
    return found


def parse_mesh(text: str) -> dict[str, int]:
    """Read "dp=2,tp=2,pp=2"; axes that are not named stay free.

    Raises:
        AutoparError: an unknown axis, an axis given twice, a size below 1.
    """
    where = f"--mesh {text}"
    found: dict[str, int] = {}
    for item in text.split(","):
        axis, is_assigned, size = (part.strip() for part in item.partition("="))
        if not is_assigned:
            raise AutoparError(f"cannot read {item.strip()!r}", where=where, fix="write --mesh dp=2,tp=2,pp=2")
        if axis not in AXES:
            raise AutoparError(f"there is no mesh axis {axis!r}", where=where, fix=f"axes are {', '.join(AXES)}")
        if axis in found:
            raise AutoparError(f"axis {axis} is given twice", where=where, fix="keep one of the two")
        if not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise AutoparError(f"{axis}={size} is no size", where=where, fix="give a whole number of at least 1")
        found[axis] = int(size)
    return found


def split_model(text: str) -> tuple[str, str | None]:
    """ "gpt.py:build" -> ("gpt.py", "build"); "gpt.py" -> ("gpt.py", None)."""
    path, colon, name = text.rpartition(":")
    if colon and path and "/" not in name and "\\" not in name:
        return path, name
    return text, None


def default_folder(model_path: str) -> Path:
    """Where `plan` writes without --out: ./gpt-autopar for gpt.py."""
    return Path(f"{Path(model_path).stem}-autopar")
