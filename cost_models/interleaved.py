"""Interleaved 1F1B as an action table: every rank holds several stages and takes microbatches in groups of the ranks.

Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2. Stage s lies on rank s modulo the number of ranks.
"""

from __future__ import annotations

from functools import cache

from .timeline import BACKWARD, FORWARD, Action, ActionTable


@cache
def interleaved_table(ranks: int, stages_per_rank: int, microbatches: int) -> ActionTable:
    """The actions of every rank.

    Raises:
        ValueError: the microbatches are no multiple of the ranks.
    """
    if microbatches % ranks:
        raise ValueError(f"interleaving needs a multiple of {ranks} microbatches, and there are {microbatches}")
    return ActionTable(by_rank=tuple(_of_rank(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks)))


def _of_rank(rank: int, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[Action, ...]:
    total = microbatches * stages_per_rank
    warmup = min(total, 2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks)
    if microbatches == ranks:
        warmup = total
    actions = [_action(i, FORWARD, rank, ranks, stages_per_rank) for i in range(warmup)]
    for i in range(total):
        if i + warmup < total:
            actions.append(_action(i + warmup, FORWARD, rank, ranks, stages_per_rank))
        actions.append(_action(i, BACKWARD, rank, ranks, stages_per_rank))
    return tuple(actions)


def _action(turn: int, kind: str, rank: int, ranks: int, stages_per_rank: int) -> Action:
    chunk = turn // ranks % stages_per_rank
    if kind == BACKWARD:
        chunk = stages_per_rank - 1 - chunk
    return Action(chunk * ranks + rank, kind, turn // (ranks * stages_per_rank) * ranks + turn % ranks)
