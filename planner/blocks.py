"""Choices by block: patterns of block names -> a value of every unit of the graph, and back.

A block is a unit of the graph that is a call of a module; all calls of one module have the same value. Plans and pins
name blocks by pattern: {"h.{0..2}": "full", "h.3": "selective"}; in pins "*" stands for all blocks that are not named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from ..cost_models.errors import AutoparError
from .fqn_patterns import expand, fold

if TYPE_CHECKING:
    from .capture.graph import ModelGraph

OTHERS = "*"
T = TypeVar("T", str, int)
_PATTERN = re.compile(r"[^{}\s]+(\{[0-9]{1,5}\.\.[0-9]{1,5}\}[^{}\s]*)?")


def is_block(graph: ModelGraph, unit: int) -> bool:
    """Whether a unit is a module's call."""
    return graph.templates[graph.units[unit].template].is_module


def blocks_of(graph: ModelGraph) -> tuple[str, ...]:
    """The FQN of every block, in the order of the model."""
    return tuple(dict.fromkeys(unit.fqn for index, unit in enumerate(graph.units) if is_block(graph, index)))


def in_short(graph: ModelGraph, values: tuple[T, ...], *, elsewhere: T) -> T | tuple[T, ...]:
    """The values of the units, as one where all blocks have the same; `elsewhere`: of units that are no blocks."""
    of_blocks = {value for unit, value in enumerate(values) if is_block(graph, unit)}
    if len(of_blocks) <= 1:
        return of_blocks.pop() if of_blocks else elsewhere
    return tuple(value if is_block(graph, unit) else elsewhere for unit, value in enumerate(values))


def by_unit(
    graph: ModelGraph,
    patterns: Mapping[str, T],
    *,
    what: str,
    where: str,
    elsewhere: T,
    default: T | None = None,
    is_pin: bool = False,
) -> T | tuple[T, ...]:
    """Values by pattern -> those of the units; `default` is that of blocks which no pattern names. `is_pin`: they are
    an option's, not a plan's.

    Raises:
        AutoparError: a name that no block has, or that stands in two patterns; a block without a value.
    """
    default = patterns.get(OTHERS, default)
    named = expanded({pattern: value for pattern, value in patterns.items() if pattern != OTHERS}, where=where)
    known = blocks_of(graph)
    if unknown := [name for name in named if name not in known]:
        shown = ", ".join(fold(known)) or "none: the model has no module that is one"
        raise AutoparError(f"there is no block {unknown[0]!r}", where=where, fix=f"blocks are {shown}")
    if default is None and (missing := [name for name in known if name not in named]):
        fix = f'add "{missing[0]}": {json.dumps(elsewhere)}'
        if is_pin:
            fix = f"add {missing[0]}={elsewhere}, or {OTHERS}={elsewhere} for all blocks that are not named"
        raise AutoparError(f"block {missing[0]} has no {what}", where=where, fix=fix)
    values = tuple(named.get(unit.fqn, elsewhere if default is None else default) for unit in graph.units)
    return in_short(graph, values, elsewhere=elsewhere)


def expanded(patterns: Mapping[str, T], *, where: str) -> dict[str, T]:
    """Values by pattern -> by name.

    Raises:
        AutoparError: a name stands in two patterns; a run that ends before it begins.
    """
    found: dict[str, T] = {}
    for pattern, value in patterns.items():
        names = expand(pattern)
        if not names:
            raise AutoparError(f"{pattern} names no block", where=where, fix="write runs upwards: h.{0..3}")
        for name in names:
            if name in found:
                raise AutoparError(f"block {name} is named twice", where=where, fix="keep one of the two")
            found[name] = value
    return found


def by_pattern(graph: ModelGraph, values: T | tuple[T, ...]) -> dict[str, T]:
    """Pattern -> value of every block, where they differ; empty where all are alike."""
    if not isinstance(values, tuple):
        return {}
    of_blocks = {unit.fqn: values[index] for index, unit in enumerate(graph.units) if is_block(graph, index)}
    return {
        pattern: value
        for value, names in groupby(of_blocks, key=lambda name: of_blocks[name])
        for pattern in fold(names)
    }


def written(patterns: Mapping[str, object]) -> str:
    """Values by pattern as a pin."""
    return ",".join(f"{pattern}={value}" for pattern, value in patterns.items())


def parse(text: str, known: Collection[str], *, refused: str, fix: str, where: str) -> dict[str, str]:
    """Read "h.{0..2}=full,h.3=selective". `refused`: what is said of an item that cannot be read.

    Raises:
        AutoparError: no such form, or no such value.
    """
    found: dict[str, str] = {}
    for item in text.split(","):
        pattern, equals, value = (part.strip() for part in item.partition("="))
        if not equals or value not in known or not _PATTERN.fullmatch(pattern):
            raise AutoparError(refused.format(item.strip()), where=where, fix=fix)
        if pattern in found:
            raise AutoparError(f"block {pattern} is named twice", where=where, fix="keep one of the two")
        found[pattern] = value
    return found


__all__ = ["OTHERS", "blocks_of", "by_pattern", "by_unit", "expanded", "in_short", "is_block", "parse", "written"]
