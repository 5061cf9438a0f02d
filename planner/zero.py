"""Which ZeRO stage parameters are under: one for all, or ZeRO-2 and ZeRO-3 for each block as it likes.

Under both FSDP2 shards parameters, gradients and optimizer states alike; under ZeRO-2 a block keeps what it has
gathered from its forward to its backward, under ZeRO-3 it gathers again. ZeRO-0 and ZeRO-1 hold parameters whole,
outside of FSDP2, so they are for all blocks or none. What lies outside the blocks is never freed in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..cost_models.errors import AutoparError
from . import blocks
from .fqn_patterns import fold, natural

if TYPE_CHECKING:
    from .capture.graph import ModelGraph

ZERO_STAGES = (0, 1, 2, 3)
KEPT, FREED = 2, 3  # the stages that may differ by block

# The stage of all parameters, or that of each unit of the graph: 3 of units that are no blocks.
Zero = int | tuple[int, ...]


def stage_of(zero: Zero, unit: int) -> int:
    """The ZeRO stage of one unit."""
    return zero if isinstance(zero, int) else zero[unit]


def highest(zero: Zero) -> int:
    """The ZeRO stage of all, 3 where blocks differ: it says what is sharded."""
    return zero if isinstance(zero, int) else FREED


def in_short(graph: ModelGraph, stages: tuple[int, ...]) -> Zero:
    """The ZeRO stages of the units, as one where all blocks have the same."""
    return blocks.in_short(graph, stages, elsewhere=FREED)


def stages_by_unit(graph: ModelGraph, stages: Mapping[str, int], *, where: str, is_pin: bool = False) -> Zero:
    """ZeRO stages by pattern -> those of the units. `is_pin`: they are an option's, not a plan's.

    Raises:
        AutoparError: a name that no block has, or that stands in two patterns; a block without a stage.
    """
    return blocks.by_unit(graph, stages, what="ZeRO stage", where=where, elsewhere=FREED, is_pin=is_pin)


def parse_zero(text: str, *, where: str) -> int | Mapping[str, int]:
    """Read "3", or "h.{0..3}=2,*=3".

    Raises:
        AutoparError: no such form, no such stage, or stages that cannot be mixed.
    """
    if isinstance(stage := pin_of(text), int):
        check_zero(stage)
        return stage
    known = tuple(map(str, ZERO_STAGES))
    fix = f"choose one of {', '.join(known)}, or name blocks: h.{{0..3}}=2,*=3"
    found = blocks.parse(text, known, refused="ZeRO stage {!r} cannot be emitted", fix=fix, where=where)
    whole = sorted({int(stage) for stage in found.values()} - {KEPT, FREED})
    if whole:
        raise AutoparError(
            f"ZeRO-{whole[0]} is for all blocks or none: it holds parameters whole, and FSDP2 has those of the others",
            where=where,
            fix=f"--zero {whole[0]}, or ZeRO-{KEPT} and ZeRO-{FREED} by block",
        )
    return {pattern: int(stage) for pattern, stage in found.items()}


def pin_of(text: str | None) -> int | str | None:
    """A pin as it is written: a number where it is for all blocks."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else text


def check_zero(zero: int) -> None:
    """Refuse a stage that there is not.

    Raises:
        AutoparError: the valid ones.
    """
    if zero not in ZERO_STAGES:
        stages = ", ".join(map(str, ZERO_STAGES))
        raise AutoparError(f"ZeRO stage {zero} cannot be emitted", fix=f"choose one of {stages}")


def zero_text(zero: int, by_block: Mapping[str, int], *, names_blocks: bool = False) -> str:
    """The stages in plain words: "3", "3 but 2 in 4 of 12 blocks", and with their names "(h.{0..3})"."""
    named = blocks.expanded(by_block, where="")
    kept = [name for name in sorted(named, key=natural) if named[name] == KEPT]
    if not named:
        return str(zero)
    return f"{zero} but {KEPT} in {len(kept)} of {len(named)} blocks" + (
        f" ({' '.join(fold(kept))})" if names_blocks else ""
    )


__all__ = [
    "FREED", "KEPT", "ZERO_STAGES", "Zero", "check_zero", "highest", "in_short", "parse_zero", "pin_of", "stage_of",
    "stages_by_unit", "zero_text",
]  # fmt: skip
