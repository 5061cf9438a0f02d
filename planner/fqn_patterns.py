"""Names of repeated blocks <-> patterns: h.0, h.1, h.2 are "h.{0..2}"."""

from __future__ import annotations

import re
from collections.abc import Iterable

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand(pattern: str) -> tuple[str, ...]:
    """Write out one range: "h.{0..2}" gives h.0, h.1, h.2."""
    match = _RANGE.search(pattern)
    if match is None:
        return (pattern,)
    first, last = int(match[1]), int(match[2])
    return tuple(f"{pattern[: match.start()]}{i}{pattern[match.end() :]}" for i in range(first, last + 1))


def fold(names: Iterable[str]) -> tuple[str, ...]:
    """Names in their order, runs of consecutive numbers as one pattern; a name that follows itself is said once."""
    found: list[str] = []
    run: list[int] = []
    base = ""

    def close() -> None:
        if run:
            found.append(f"{base}.{run[0]}" if len(run) == 1 else f"{base}.{{{run[0]}..{run[-1]}}}")
            run.clear()

    for name in names:
        parent, _, index = name.rpartition(".")
        if index.isdigit() and parent:
            if run and (parent != base or int(index) != run[-1] + 1):
                close()
            base = parent
            run.append(int(index))
            continue
        close()
        if not found or found[-1] != name:
            found.append(name)
    close()
    return tuple(found)


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key with numbers by value: h.2 before h.10."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split("."))


__all__ = ["expand", "fold", "natural"]
