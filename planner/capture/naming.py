"""Readable, unique names: of nodes relative to their unit, of templates, and FQN patterns over repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Names:
    """Hands out each name once; a second use gets a number: relu, relu_1, relu_2."""

    separator: str = "_"
    taken: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    def unique(self, wanted: str) -> str:
        name = wanted
        while name in self.taken:
            self.counts[wanted] = self.counts.get(wanted, 0) + 1
            name = f"{wanted}{self.separator}{self.counts[wanted]}"
        self.taken.add(name)
        return name


def relative(path: str, fqn: str) -> str | None:
    """`path` seen from `fqn`: "" for itself, None where it does not lie inside."""
    if path == fqn or not fqn:
        return "" if path == fqn else path
    return path.removeprefix(fqn + ".") if path.startswith(fqn + ".") else None


def camel(name: str) -> str:
    """Words joined by anything else, as a class has them: out_proj -> OutProj."""
    words = [word for word in re.split(r"\W|_", name) if word]
    return "".join(word[0].upper() + word[1:] for word in words) or "Operations"


def pattern_of(fqns: Sequence[str]) -> str:
    """One pattern for the FQNs of a template's units: "h.*", or "h.{0,2,4}" where numbers are left out."""
    distinct = list(dict.fromkeys(fqns))
    if len(distinct) == 1:
        return distinct[0]
    parts = [fqn.split(".") for fqn in distinct]
    if len({len(part) for part in parts}) != 1:
        return "{" + ",".join(distinct) + "}"
    columns = [list(dict.fromkeys(column)) for column in zip(*parts, strict=True)]
    varying = [column for column in columns if len(column) > 1]
    if len(varying) != 1:
        return "{" + ",".join(distinct) + "}"
    numbers = [int(text) for text in varying[0] if text.isdigit()]
    if len(numbers) == len(varying[0]) and numbers == list(range(len(numbers))):
        choice = "*"
    elif len(numbers) == len(varying[0]) and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        choice = f"{{{numbers[0]}..{numbers[-1]}}}"
    else:
        choice = "{" + ",".join(varying[0]) + "}"
    return ".".join(choice if len(column) > 1 else column[0] for column in columns)
