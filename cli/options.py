"""What options mean that take more than a word: key=value pairs, the folder for a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..planner.errors import AutoparError


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


def default_folder(model: str) -> Path:
    """Where `plan` writes without --out: ./gpt-autopar for models/gpt.py:build."""
    return Path(f"{Path(Path(model).name.partition(':')[0]).stem}-autopar")
