"""The data of the op-level integer program (`placements_ilp.py`): vertices with choices, groups, an answer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

State = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a vertex: what it makes and wants, in states, with its seconds and bytes (already weighted)."""

    label: Hashable
    outputs: tuple[State, ...]
    operands: tuple[State, ...] = ()
    cost_seconds: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A value and all who read it. `prices` holds seconds by (made, wanted); a pair that is missing is impossible."""

    producer: tuple[int, int]  # vertex, output
    consumers: tuple[tuple[int, int], ...]  # vertex, operand
    weight: float
    prices: Mapping[tuple[State, State], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """`names` say who the vertices are, for messages."""

    names: tuple[str, ...]
    choices: tuple[tuple[Choice, ...], ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Position of the choice of every vertex. `bound_seconds` is proven: no assignment costs less."""

    chosen: tuple[int, ...]
    cost_seconds: float
    memory_bytes: float
    bound_seconds: float
    is_optimal: bool


class NoAssignment(Exception):
    """No assignment exists; `vertex` names one that has no choice left, "" if only the solver can tell."""

    def __init__(self, vertex: str = "") -> None:
        super().__init__(vertex)
        self.vertex = vertex


class Stopped(NoAssignment):
    """The time limit ended the solver before it knew an assignment, or that there is none."""


def cost_of(problem: Problem, chosen: Sequence[int]) -> float:
    """Seconds of an assignment; infinite if it needs a conversion that does not exist."""
    total = sum(choices[k].cost_seconds for choices, k in zip(problem.choices, chosen, strict=True))
    for group in problem.groups:
        made = _made(problem, group, chosen)
        for wanted in {problem.choices[n][chosen[n]].operands[j] for n, j in group.consumers}:
            total += group.weight * group.prices.get((made, wanted), inf)
    return total


def memory_of(problem: Problem, chosen: Sequence[int]) -> float:
    return sum(choices[k].memory_bytes for choices, k in zip(problem.choices, chosen, strict=True))


def _made(problem: Problem, group: Group, chosen: Sequence[int]) -> State:
    vertex, output = group.producer
    return problem.choices[vertex][chosen[vertex]].outputs[output]
