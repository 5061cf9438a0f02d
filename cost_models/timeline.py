"""Schedule actions with durations -> step seconds, bubble and a trace per rank, by simulating event by event.

Each rank runs its actions in their order. A forward waits for the activation of the stage before it, a backward for the
gradient of the stage after it; both arrive `p2p_seconds` after they were made. Transfers do not keep a rank busy.
A backward may be split: I makes the gradients of a stage's inputs, which the stage before waits for, W those of its
weights, for which nobody waits.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import NamedTuple

FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = KINDS = ("F", "B", "I", "W")
_SLOT = {kind: slot for slot, kind in enumerate(KINDS)}
_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One microbatch through one stage; prints as `2F0`: stage, kind, microbatch."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


_Key = tuple[int, str, int]  # equal to an action, and quicker to make


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        ValueError: it is none.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no action such as 2F0")
    return Action(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True, kw_only=True, eq=False)
class ActionTable:
    """The actions of every rank, checked once, and in an order in which they can be simulated.

    Raises:
        ValueError: an action is there twice, one is missing that another needs, or the ranks wait for each other.
    """

    by_rank: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        _ = self.steps

    @cached_property
    def steps(self) -> tuple[tuple[int, int, int, int, int], ...]:
        """(rank, duration slot, producer, edge, own action before) in topological order; -1 where there is none.

        Producer and own action are positions in this order, edge is the stage whose output crosses (s for s -> s+1).
        The duration slot of (stage, kind) is `_slot`.
        """
        everything = list(chain.from_iterable(self.by_rank))
        known: set[_Key] = set(everything)
        if len(known) != len(everything):
            raise ValueError("an action is scheduled twice")
        last_stage = max((action.stage for action in everything), default=0)
        position: dict[_Key, int] = {}
        waiting: dict[_Key, list[int]] = {}
        next_of = [0] * len(self.by_rank)
        ready = list(range(len(self.by_rank)))
        steps: list[tuple[int, int, int, int, int]] = []
        while ready:
            rank = ready.pop()
            actions = self.by_rank[rank]
            while next_of[rank] < len(actions):
                action = actions[next_of[rank]]
                producer, edge, own = _needs(action, last_stage, known)
                missing = None if producer is None or producer in position else producer
                missing = missing if own is None or own in position else missing or own
                if missing is not None:
                    if missing not in known:
                        raise ValueError(f"{action} needs {Action(*missing)}, which no rank runs")
                    waiting.setdefault(missing, []).append(rank)
                    break
                steps.append(
                    (
                        rank,
                        _slot(action.stage, action.kind),
                        -1 if producer is None else position[producer],
                        edge,
                        -1 if own is None else position[own],
                    )
                )
                position[action] = len(position)
                next_of[rank] += 1
                ready.extend(waiting.pop(action, ()))
        if len(steps) != len(everything):
            stuck = [str(self.by_rank[r][i]) for r, i in enumerate(next_of) if i < len(self.by_rank[r])]
            raise ValueError(f"the schedule deadlocks: ranks wait at {', '.join(stuck)}")
        return tuple(steps)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max((action.stage for actions in self.by_rank for action in actions), default=-1)


def _slot(stage: int, kind: str) -> int:
    return len(KINDS) * stage + _SLOT[kind]


def _needs(action: Action, last_stage: int, known: Container[_Key]) -> tuple[_Key | None, int, _Key | None]:
    """What another stage must have made, over which edge, and what this stage must have run."""
    stage, kind, microbatch = action
    if kind == FORWARD:
        return ((stage - 1, FORWARD, microbatch), stage - 1, None) if stage else (None, -1, None)
    if kind == WEIGHT_GRADIENT:
        return None, -1, (stage, INPUT_GRADIENT, microbatch)
    own = stage, FORWARD, microbatch
    if stage == last_stage:
        return None, -1, own
    split = stage + 1, INPUT_GRADIENT, microbatch
    return split if split in known else (stage + 1, BACKWARD, microbatch), stage, own


@dataclass(frozen=True, slots=True)
class Event:
    """An action that kept its rank busy."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One simulated step. `bubble_fraction` is the part of all ranks' time in which they wait."""

    step_seconds: float
    busy_seconds: tuple[float, ...]
    bubble_fraction: float
    events: tuple[tuple[Event, ...], ...] = field(repr=False)  # by rank, in order

    def idle_seconds(self, rank: int) -> float:
        return self.step_seconds - self.busy_seconds[rank]


def _edges(p2p_seconds: float | Sequence[float], num_stages: int) -> list[float]:
    if isinstance(p2p_seconds, int | float):
        return [float(p2p_seconds)] * max(0, num_stages - 1)
    if len(p2p_seconds) != num_stages - 1:
        raise ValueError(f"{len(p2p_seconds)} edges for {num_stages} stages")
    return [float(seconds) for seconds in p2p_seconds]


def _run(
    table: ActionTable, durations: Mapping[tuple[int, str], float], edges: Sequence[float], slow: Mapping[int, float]
) -> tuple[list[float], list[float], list[float]]:
    """(start by step, end by step, time at which each rank is done)."""
    length = [0.0] * (len(KINDS) * table.num_stages)
    for (stage, kind), seconds in durations.items():
        length[_slot(stage, kind)] = seconds
    factor = [slow.get(rank, 1.0) for rank in range(len(table.by_rank))]
    free = [0.0] * len(table.by_rank)
    starts: list[float] = []
    ends: list[float] = []
    for rank, slot, producer, edge, own in table.steps:
        start = free[rank]
        if producer >= 0 and (arrival := ends[producer] + edges[edge]) > start:
            start = arrival
        if own >= 0 and ends[own] > start:
            start = ends[own]
        free[rank] = end = start + length[slot] * factor[rank]
        starts.append(start)
        ends.append(end)
    return starts, ends, free


def simulate(
    actions: ActionTable | Sequence[Sequence[Action]],
    durations: Mapping[tuple[int, str], float],
    p2p_seconds: float | Sequence[float] = 0.0,
    *,
    slow: Mapping[int, float] | None = None,
) -> Timeline:
    """Run the schedule.

    `durations`: (stage, kind) -> seconds of one microbatch. `p2p_seconds`: of one transfer, alike on every edge
    or one number for each edge s -> s+1. `slow`: rank -> factor on its compute (stragglers).

    Raises:
        ValueError: a schedule that cannot run, or as many edges as do not fit.
    """
    table = actions if isinstance(actions, ActionTable) else ActionTable(by_rank=tuple(map(tuple, actions)))
    starts, ends, free = _run(table, durations, _edges(p2p_seconds, table.num_stages), slow or {})
    events: list[list[Event]] = [[] for _ in table.by_rank]
    for (rank, *_), start, end in zip(table.steps, starts, ends, strict=True):
        events[rank].append(Event(table.by_rank[rank][len(events[rank])], start, end))
    busy = tuple(sum(event.end_seconds - event.start_seconds for event in row) for row in events)
    step = max(free, default=0.0)
    total = step * len(table.by_rank)
    return Timeline(
        step_seconds=step,
        busy_seconds=busy,
        bubble_fraction=max(0.0, 1 - sum(busy) / total) if total else 0.0,
        events=tuple(map(tuple, events)),
    )


def schedule_seconds(
    table: ActionTable, durations: Mapping[tuple[int, str], float], p2p_seconds: float | Sequence[float] = 0.0
) -> float:
    """`simulate(...).step_seconds` without the trace: what a search asks for thousands of times."""
    return max(_run(table, durations, _edges(p2p_seconds, table.num_stages), {})[2], default=0.0)
