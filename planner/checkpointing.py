"""Which blocks the backward computes again, and how much of them: one policy for all, or one for each block.

A block is a unit of the graph that is a call of a module; all calls of one module have the same policy. Plans and pins
name blocks by pattern: {"h.{0..2}": "full", "h.3": "selective"}, and what they leave out keeps all that it saves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from ..cost_models.errors import AutoparError
from .fqn_patterns import expand, fold, natural

if TYPE_CHECKING:
    from .capture.graph import ModelGraph

# Nothing runs again; all of a block but products and attention; all of it. Each takes longer and keeps less.
POLICIES = ("none", "selective", "full")
MIXED = "mixed"

_PATTERN = re.compile(r"[^{}\s]+(\{[0-9]{1,5}\.\.[0-9]{1,5}\}[^{}\s]*)?")

# The policy of all blocks, or that of each unit of the graph: "none" of units that are no blocks.
Checkpointing = str | tuple[str, ...]


def policy_of(checkpointing: Checkpointing, unit: int) -> str:
    """The policy of one unit."""
    return checkpointing if isinstance(checkpointing, str) else checkpointing[unit]


def name_of(checkpointing: Checkpointing) -> str:
    """The policy of all blocks, or "mixed"."""
    return checkpointing if isinstance(checkpointing, str) else MIXED


def is_block(graph: ModelGraph, unit: int) -> bool:
    """Whether a unit is a module's call, which can run again."""
    return graph.templates[graph.units[unit].template].is_module


def blocks_of(graph: ModelGraph) -> tuple[str, ...]:
    """The FQN of every block, in the order of the model."""
    return tuple(dict.fromkeys(unit.fqn for index, unit in enumerate(graph.units) if is_block(graph, index)))


def in_short(graph: ModelGraph, policies: tuple[str, ...]) -> Checkpointing:
    """The policies of the units, as one where all blocks have the same."""
    of_blocks = {policy for unit, policy in enumerate(policies) if is_block(graph, unit)}
    if len(of_blocks) <= 1:
        return of_blocks.pop() if of_blocks else "none"
    return tuple(policy if is_block(graph, unit) else "none" for unit, policy in enumerate(policies))


def by_unit(
    graph: ModelGraph, checkpoints: Mapping[str, str], *, where: str, default: str | None = None
) -> Checkpointing:
    """Policies by pattern -> those of the units; `default` is that of blocks which no pattern names.

    Raises:
        AutoparError: a name that no block has, or that stands in two patterns; a block without policy.
    """
    named = expanded(checkpoints, where=where)
    known = blocks_of(graph)
    if unknown := [name for name in named if name not in known]:
        shown = ", ".join(fold(known)) or "none: the model has no module that could run again"
        raise AutoparError(f"there is no block {unknown[0]!r}", where=where, fix=f"blocks are {shown}")
    if default is None and (missing := [name for name in known if name not in named]):
        raise AutoparError(f"block {missing[0]} has no policy", where=where, fix=f'add "{missing[0]}": "none"')
    return in_short(graph, tuple(named.get(unit.fqn, default or "none") for unit in graph.units))


def expanded(checkpoints: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Policies by pattern -> by name.

    Raises:
        AutoparError: a name stands in two patterns.
    """
    found: dict[str, str] = {}
    for pattern, policy in checkpoints.items():
        for name in expand(pattern):
            if name in found:
                raise AutoparError(f"block {name} is named twice", where=where, fix="keep one of the two")
            found[name] = policy
    return found


def by_pattern(graph: ModelGraph, checkpointing: Checkpointing) -> dict[str, str]:
    """Pattern -> policy of every block, where they differ; empty where all are alike."""
    if isinstance(checkpointing, str):
        return {}
    policies = {unit.fqn: checkpointing[index] for index, unit in enumerate(graph.units) if is_block(graph, index)}
    return {
        pattern: policy
        for policy, names in groupby(policies, key=lambda name: policies[name])
        for pattern in fold(names)
    }


def parse_checkpoints(text: str, *, where: str) -> Mapping[str, str]:
    """Read "h.{0..2}=full,h.3=selective".

    Raises:
        AutoparError: no such form, or no such policy.
    """
    found: dict[str, str] = {}
    for item in text.split(","):
        pattern, equals, policy = (part.strip() for part in item.partition("="))
        if not equals or policy not in POLICIES or not _PATTERN.fullmatch(pattern):
            raise AutoparError(
                f"activation checkpointing {item.strip()!r} cannot be emitted",
                where=where,
                fix=f"choose one of {', '.join(POLICIES)}, or name blocks: h.{{0..2}}=full,h.3=selective",
            )
        if pattern in found:
            raise AutoparError(f"block {pattern} is named twice", where=where, fix="keep one of the two")
        found[pattern] = policy
    return found


def described(checkpoints: Mapping[str, str], *, names_blocks: bool = False) -> str:
    """Policies by pattern in plain words: "9 of 32 blocks recomputed in full", and with their names "(h.{0..8})"."""
    named = expanded(checkpoints, where="")
    found: list[str] = []
    for policy, words in (("full", "in full"), ("selective", "but for products and attention")):
        mine = [name for name in sorted(named, key=natural) if named[name] == policy]
        if mine:
            count = str(len(mine)) if found else f"{len(mine)} of {len(named)} blocks recomputed"
            found.append(f"{count} {words}" + (f" ({' '.join(fold(mine))})" if names_blocks else ""))
    return ", ".join(found)


__all__ = [
    "MIXED", "POLICIES", "Checkpointing", "blocks_of", "by_pattern", "by_unit", "described", "expanded", "in_short",
    "is_block", "name_of", "parse_checkpoints", "policy_of",
]  # fmt: skip
