"""Which blocks the backward computes again, and how much of them: one policy for all, or one for each block.

Blocks are named by pattern (`blocks.py`): {"h.{0..2}": "full", "h.3": "selective"}. What pins leave out keeps all that
it saves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..cost_models.errors import AutoparError
from . import blocks
from .fqn_patterns import fold, natural

if TYPE_CHECKING:
    from .capture.graph import ModelGraph

# Nothing runs again; all of a block but products and attention; all of it. Each takes longer and keeps less.
POLICIES = ("none", "selective", "full")
MIXED = "mixed"

# The policy of all blocks, or that of each unit of the graph: "none" of units that are no blocks.
Checkpointing = str | tuple[str, ...]


def policy_of(checkpointing: Checkpointing, unit: int) -> str:
    """The policy of one unit."""
    return checkpointing if isinstance(checkpointing, str) else checkpointing[unit]


def name_of(checkpointing: Checkpointing) -> str:
    """The policy of all blocks, or "mixed"."""
    return checkpointing if isinstance(checkpointing, str) else MIXED


def runs_more_again(graph: ModelGraph, checkpointing: Checkpointing, *, than: Checkpointing) -> bool:
    """Whether every block runs at least as much again as under another policy."""
    units = [unit for unit in range(len(graph.units)) if blocks.is_block(graph, unit)]
    return all(POLICIES.index(policy_of(checkpointing, u)) >= POLICIES.index(policy_of(than, u)) for u in units)


def why_not_selective(graph: ModelGraph) -> str:
    """What keeps blocks from selective checkpointing; "" if nothing does."""
    from .sharding.rules import rule_of

    for template in graph.templates:
        for op in (node.op for node in template.nodes if template.is_module):
            if op and (rule := rule_of(op)) is not None and rule.overwrites_products:
                return f"{op} in {template.pattern} writes over its own products, which selective checkpointing keeps"
    return ""


def policies_of(graph: ModelGraph) -> tuple[str, ...]:
    """Those that blocks of the graph can have, in the order of `POLICIES`."""
    barred = ("selective",) if why_not_selective(graph) else ()
    return tuple(policy for policy in POLICIES if policy not in barred)


def refuse_selective(graph: ModelGraph, policies: Collection[str], *, where: str) -> None:
    """Refuse a choice of policies that the graph's blocks cannot have.

    Raises:
        AutoparError: why, and the other policies.
    """
    if "selective" in policies and (reason := why_not_selective(graph)):
        raise AutoparError(reason, where=where, fix=f"choose one of {', '.join(policies_of(graph))}")


def in_short(graph: ModelGraph, policies: tuple[str, ...]) -> Checkpointing:
    """The policies of the units, as one where all blocks have the same."""
    return blocks.in_short(graph, policies, elsewhere="none")


def by_unit(
    graph: ModelGraph, checkpoints: Mapping[str, str], *, where: str, default: str | None = None
) -> Checkpointing:
    """Policies by pattern -> those of the units; `default` is that of blocks which no pattern names.

    Raises:
        AutoparError: a name that no block has, or that stands in two patterns; a block without policy.
    """
    return blocks.by_unit(graph, checkpoints, what="policy", where=where, elsewhere="none", default=default)


def parse_checkpoints(text: str, *, where: str) -> Mapping[str, str]:
    """Read "h.{0..2}=full,h.3=selective".

    Raises:
        AutoparError: no such form, or no such policy.
    """
    example = f"choose one of {', '.join(POLICIES)}, or name blocks: h.{{0..2}}=full,h.3=selective"
    return blocks.parse(
        text, POLICIES, refused="activation checkpointing {!r} cannot be emitted", fix=example, where=where
    )


def described(checkpoints: Mapping[str, str], *, names_blocks: bool = False) -> str:
    """Policies by pattern in plain words: "9 of 32 blocks recomputed in full", and with their names "(h.{0..8})"."""
    named = blocks.expanded(checkpoints, where="")
    found: list[str] = []
    for policy, words in (("full", "in full"), ("selective", "but for products and attention")):
        mine = [name for name in sorted(named, key=natural) if named[name] == policy]
        if mine:
            count = str(len(mine)) if found else f"{len(mine)} of {len(named)} blocks recomputed"
            found.append(f"{count} {words}" + (f" ({' '.join(fold(mine))})" if names_blocks else ""))
    return ", ".join(found)


__all__ = [
    "MIXED", "POLICIES", "Checkpointing", "by_unit", "described", "in_short", "name_of", "parse_checkpoints",
    "policy_of", "runs_more_again",
]  # fmt: skip
