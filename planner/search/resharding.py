"""A cut, a schedule and recomputation under ZeRO-3 -> the blocks under ZeRO-2, for as few seconds as memory allows.

A block under ZeRO-2 keeps its gathered parameters from forward to backward: it takes room and spares a gather. Ranks of
a pipeline do not depend on each other here, and blocks that hold alike parameters on one stage are alike, so a choice
is a number of such blocks for each kind k of a rank, n_k of c_k. Seconds fall as any n_k grows:

    min  seconds(n)   s.t.  memory(n) <= memory of the device,  0 <= n_k <= c_k

Of the kind with most blocks the largest number that fits is best, whatever the others are; these are tried in all
combinations, priced and measured as the plan will be. Where combinations are too many, kinds of few blocks are taken
together: their blocks are kept in a fixed order. Within a stage the last blocks are kept: their backward comes first,
and would have nothing to hide a gather behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from ..blocks import is_block
from ..checkpointing import Checkpointing
from ..schedules import stages_by_rank
from ..zero import FREED, KEPT, Zero, in_short
from .dp_ranks import PipelineRank
from .evaluate import Evaluator

_MOST_COMBINATIONS = 200

_Block = tuple[int, ...]  # the units that are calls of one module


@dataclass(frozen=True)
class Resharding:
    """ZeRO-2 and ZeRO-3 by block for one cut. `hbm_bytes`: by pipeline rank."""

    evaluator: Evaluator
    stages: tuple[tuple[int, int], ...]
    schedule: str
    checkpoint: Checkpointing
    hbm_bytes: tuple[int, ...]

    def fastest(self) -> Zero | None:
        """The stages of the blocks that take the fewest seconds; None where no choice fits."""
        graph, ranks = self.evaluator.graph, self.evaluator.mesh.pp
        found = [FREED] * len(graph.units)
        for rank, mine in enumerate(stages_by_rank(self.schedule, ranks, len(self.stages))):
            kept = self._of_rank(rank, _together(self._kinds(mine)))
            if kept is None:
                return None
            for unit in kept:
                found[unit] = KEPT
        return in_short(graph, tuple(found))

    def _of_rank(self, rank: int, kinds: list[list[_Block]]) -> list[int] | None:
        """The units of a rank that are kept."""
        *others, most = sorted(kinds, key=len) or [[]]
        best: tuple[float, list[int]] | None = None
        for counts in product(*(range(len(kind) + 1) for kind in others)):
            before = [block for kind, count in zip(others, counts, strict=True) for block in kind[:count]]
            for count in range(len(most), -1, -1):
                units = [unit for block in (*before, *most[:count]) for unit in block]
                priced = self._priced(rank, units)
                if priced.memory["total"] <= self.hbm_bytes[rank]:
                    seconds = self.evaluator.mesh.microbatches * priced.acting_seconds + priced.after_seconds
                    best = (seconds, units) if best is None or seconds < best[0] else best
                    break
        return None if best is None else best[1]

    def _priced(self, rank: int, kept: Sequence[int]) -> PipelineRank:
        zero = [FREED] * len(self.evaluator.graph.units)
        for unit in kept:
            zero[unit] = KEPT
        return self.evaluator.rank(
            rank, self.stages, schedule=self.schedule, zero=tuple(zero), activation_checkpoint=self.checkpoint
        )

    def _kinds(self, mine: Sequence[int]) -> Iterator[list[_Block]]:
        """The blocks of a rank's stages that are alike, the last ones first."""
        sharing = self.evaluator.kinds.sharing
        alike: dict[object, list[_Block]] = {}
        for stage in mine:
            for block in reversed(self._blocks[stage]):
                template = self.evaluator.kinds.templates[block[0]]
                key = (stage, block if sharing.intersection(block) else template)
                alike.setdefault(key, []).append(block)
        yield from alike.values()

    @cached_property
    def _blocks(self) -> list[list[_Block]]:
        """By stage, without modules that are called on several."""
        graph = self.evaluator.graph
        calls: dict[str, list[int]] = {}
        for index, unit in enumerate(graph.units):
            if is_block(graph, index):
                calls.setdefault(unit.fqn, []).append(index)
        return [
            [tuple(units) for units in calls.values() if first <= units[0] and units[-1] < last]
            for first, last in self.stages
        ]


def _together(kinds: Iterator[list[_Block]]) -> list[list[_Block]]:
    """Kinds of which all combinations may be tried."""
    found = sorted(kinds, key=len)
    while prod(len(kind) + 1 for kind in found[:-1]) > _MOST_COMBINATIONS:
        first, second, *others = found
        found = sorted([first + second, *others], key=len)
    return found


__all__ = ["Resharding"]
