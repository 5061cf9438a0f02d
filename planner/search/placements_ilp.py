"""The op-level integer program: one choice per vertex, conversions between them, cheapest total.

Sets
    n      vertices: operations, parameters, inputs, buffers. Folded: a repeated block is there once.
    o      choices of a vertex. A choice makes state p(o, i) of its output i, wants state r(o, j) at its operand j,
           costs c(o) seconds and holds m(o) bytes. A state is how a value lies on the mesh (any hashable).
    g      sharing groups: one value (vertex, output), its consumers k = (vertex, operand), weight w_g (times a step).
           C_g(p, r) is the price of converting p to r; a pair without a price is impossible.

Variables
    x[n,o]        1 where vertex n takes choice o (the only binary ones)
    e[g,k,p,r]    1 where group g is made in p and consumer k wants r (continuous; integral x force it)
    z[g,p,r]      1 where the conversion p -> r of group g runs; consumers that want the same state share it

    min   sum_n,o (c(o) + lambda m(o)) x[n,o]  +  sum_g,p,r w_g C_g(p,r) z[g,p,r]
    s.t.  sum_o x[n,o] = 1                                          for each n
          sum_r e[g,k,p,r] = sum_{o: p(o,i) = p} x[prod(g),o]       for each g, k, p
          sum_p e[g,k,p,r] = sum_{o: r(o,j) = r} x[cons(k),o]       for each g, k, r
          z[g,p,r] >= e[g,k,p,r]                                    for each g, k, p, r, C > 0; one consumer: z = e
          sum_n,o m(o) x[n,o] <= M                                  only with a memory limit (exact mode)

Columns of e are indexed by distinct states, not by pairs of choices. A z that is the largest e, not their sum, is what
makes q, k and v after one all_gather cost one all_gather. A back edge of a repeated block is one more group; cycles
are no problem.

Before the solver sees it, choices are removed that no neighbour can serve (arc consistency), or that another choice
with the same states beats; sources and unary chains are merged (`chains.py`). The LP relaxation is solved first; only
a fractional answer goes to branch and bound. Ties are broken by a price far below any real one, for earlier choices
and for fewer conversions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isinf
from typing import Any

import pulp

from .assignment import Assignment, Choice, Group, NoAssignment, Problem, State, cost_of, memory_of
from .chains import TIE_CONVERSION_SECONDS, reduce
from .solver import run_solver

_SCALE = 1e6  # the solver sees microseconds: its tolerances are absolute, about 1e-7
_INTEGRAL = 1e-6


def solve(
    problem: Problem,
    *,
    seconds_per_byte: float = 0.0,
    memory_limit_bytes: float | None = None,
    time_limit_seconds: float | None = None,
) -> Assignment:
    """The cheapest assignment; `seconds_per_byte` is lambda.

    Raises:
        NoAssignment: there is none.
    """
    alive = [
        _undominated(choices, ks, seconds_per_byte, memory_limit_bytes is not None)
        for choices, ks in zip(problem.choices, consistent(problem), strict=True)
    ]
    reduced = reduce(problem, alive, seconds_per_byte, merge=memory_limit_bytes is None)
    model = _Model(reduced.problem, memory_limit_bytes)
    values = model.run(as_mip=False, time_limit_seconds=time_limit_seconds)
    bound = model.objective_seconds
    is_optimal = True
    if any(_INTEGRAL < value < 1 - _INTEGRAL for value in values.values()):
        values = model.run(as_mip=True, time_limit_seconds=time_limit_seconds)
        is_optimal = model.is_proven
        if is_optimal:
            bound = model.objective_seconds
    positions = [0] * len(problem.choices)
    for n, choices in enumerate(reduced.picks):
        for vertex, k in choices[max(range(len(choices)), key=lambda k, n=n: (values[n, k], -k))]:
            positions[vertex] = k
    chosen = tuple(positions)
    cost = cost_of(problem, chosen)
    if isinf(cost):
        raise NoAssignment
    memory = memory_of(problem, chosen)
    return Assignment(
        chosen=chosen,
        cost_seconds=cost,
        memory_bytes=memory,
        bound_seconds=min(bound - reduced.ties_seconds, cost + seconds_per_byte * memory),
        is_optimal=is_optimal,
    )


def consistent(problem: Problem) -> list[list[int]]:
    """Choices that survive arc consistency, by vertex: those that every neighbour can serve.

    Raises:
        NoAssignment: a vertex lost all of its choices.
    """
    alive: list[list[int]] = [list(range(len(choices))) for choices in problem.choices]
    links: list[list[int]] = [[] for _ in problem.choices]
    for index, group in enumerate(problem.groups):
        for vertex in {group.producer[0], *(n for n, _ in group.consumers)}:
            links[vertex].append(index)
    queue = list(range(len(problem.groups)))
    waiting = set(queue)
    while queue:
        index = queue.pop(0)
        waiting.discard(index)
        for vertex in _revise(problem, problem.groups[index], alive):
            for other in links[vertex]:
                if other not in waiting:
                    waiting.add(other)
                    queue.append(other)
    for vertex, ks in enumerate(alive):
        if not ks:
            raise NoAssignment(problem.names[vertex])
    return alive


def _revise(problem: Problem, group: Group, alive: list[list[int]]) -> list[int]:
    """Drop choices of producer and consumers that no partner in the group can serve; the vertices that changed."""
    producer, output = group.producer
    pairs = group.prices.keys()
    made = {problem.choices[producer][k].outputs[output] for k in alive[producer]}
    changed = []
    for vertex, position in group.consumers:
        reachable = {r for p, r in pairs if p in made}
        kept = [k for k in alive[vertex] if problem.choices[vertex][k].operands[position] in reachable]
        if len(kept) < len(alive[vertex]):
            if not kept:
                raise NoAssignment(problem.names[vertex])
            alive[vertex] = kept
            changed.append(vertex)
        wanted = {problem.choices[vertex][k].operands[position] for k in alive[vertex]}
        useful = {p for p, r in pairs if r in wanted}
        kept = [k for k in alive[producer] if problem.choices[producer][k].outputs[output] in useful]
        if len(kept) < len(alive[producer]):
            if not kept:
                raise NoAssignment(problem.names[producer])
            alive[producer] = kept
            made = {problem.choices[producer][k].outputs[output] for k in kept}
            changed.append(producer)
    return changed


def _undominated(
    choices: Sequence[Choice], positions: Sequence[int], seconds_per_byte: float, keep_memory: bool
) -> list[int]:
    """Of the choices with the same states only the cheapest (with a memory row: those on the front), earlier first."""
    by_states: dict[tuple[object, ...], list[int]] = {}
    for k in positions:
        by_states.setdefault((choices[k].outputs, choices[k].operands), []).append(k)
    kept: list[int] = []
    for ks in by_states.values():
        if keep_memory:
            best_memory = inf
            for k in sorted(ks, key=lambda k: (choices[k].cost_seconds, choices[k].memory_bytes, k)):
                if choices[k].memory_bytes < best_memory:
                    best_memory = choices[k].memory_bytes
                    kept.append(k)
        else:
            kept.append(
                min(ks, key=lambda k: (choices[k].cost_seconds + seconds_per_byte * choices[k].memory_bytes, k))
            )
    return sorted(kept)


class _Model:
    """The PuLP model of a problem. Vertices with one choice are constants."""

    def __init__(self, problem: Problem, memory_limit_bytes: float | None) -> None:
        self.problem = problem
        self.lp = pulp.LpProblem("placements", pulp.LpMinimize)
        self.constant = 0.0  # microseconds of the vertices that have no choice, for the bound
        self.is_proven = False
        self.x: dict[tuple[int, int], pulp.LpVariable | None] = {}
        self.terms: list[tuple[pulp.LpVariable, float]] = []
        self.num_columns = 0
        self._add_choices()
        for group in problem.groups:
            self._add_group(group)
        if memory_limit_bytes is not None:
            self._add_memory_row(memory_limit_bytes)
        self.lp.setObjective(pulp.LpAffineExpression(self.terms))

    def _column(self, prefix: str, price: float) -> pulp.LpVariable:
        column = self.lp.add_variable(f"{prefix}{self.num_columns:06d}", 0, 1 if prefix == "x" else None)
        self.num_columns += 1
        self.terms.append((column, price))
        return column

    def _add_choices(self) -> None:
        """sum_o x[n,o] = 1"""
        for n, choices in enumerate(self.problem.choices):
            # The cheapest choice is taken as given, the others by their difference: keeps the numbers small.
            floor = min(choice.cost_seconds for choice in choices)
            self.constant += floor * _SCALE
            if len(choices) == 1:
                self.x[n, 0] = None
                continue
            columns = [self._column("x", (choice.cost_seconds - floor) * _SCALE) for choice in choices]
            self.x.update(((n, k), column) for k, column in enumerate(columns))
            self._equal([(column, 1.0) for column in columns], 1.0)

    def _equal(self, terms: list[tuple[pulp.LpVariable, float]], value: float) -> None:
        self.lp.addConstraint(pulp.LpConstraint(terms, pulp.LpConstraintEQ, rhs=value))

    def _add_group(self, group: Group) -> None:
        """The rows of e, and z >= e."""
        problem = self.problem
        producer, output = group.producer
        made = _by_state(
            (problem.choices[producer][k].outputs[output], k) for k in range(len(problem.choices[producer]))
        )
        shared: dict[tuple[State, State], pulp.LpVariable] = {}
        # A consumer that reads the value twice is two consumers here.
        is_shared = len(group.consumers) > 1
        for vertex, position in group.consumers:
            wanted = _by_state(
                (problem.choices[vertex][k].operands[position], k) for k in range(len(problem.choices[vertex]))
            )
            of_made: dict[State, list[pulp.LpVariable]] = {p: [] for p in made}
            of_wanted: dict[State, list[pulp.LpVariable]] = {r: [] for r in wanted}
            for p in made:
                for r in wanted:
                    seconds = group.prices.get((p, r))
                    if seconds is None:
                        continue
                    price = group.weight * seconds * _SCALE + (TIE_CONVERSION_SECONDS * _SCALE if p != r else 0.0)
                    edge = self._column("e", 0.0 if is_shared else price)
                    of_made[p].append(edge)
                    of_wanted[r].append(edge)
                    if is_shared and price > 0:
                        if (p, r) not in shared:
                            shared[p, r] = self._column("z", price)
                        self.lp.addConstraint(
                            pulp.LpConstraint([(shared[p, r], 1.0), (edge, -1.0)], pulp.LpConstraintGE, rhs=0)
                        )
            for p, ks in made.items():
                self._balance(of_made[p], producer, ks)
            for r, ks in wanted.items():
                self._balance(of_wanted[r], vertex, ks)

    def _balance(self, edges: list[pulp.LpVariable], vertex: int, ks: list[int]) -> None:
        """sum e = sum x over the choices that make (or want) the state."""
        terms = [(edge, 1.0) for edge in edges]
        if self.x[vertex, ks[0]] is None:
            self._equal(terms, 1.0)
            return
        columns = [(self.x[vertex, k], -1.0) for k in ks]
        terms.extend((column, sign) for column, sign in columns if column is not None)
        self._equal(terms, 0.0)

    def _add_memory_row(self, limit_bytes: float) -> None:
        """sum m(o) x[n,o] <= M, in units of the limit."""
        terms = []
        fixed = 0.0
        for (n, k), column in self.x.items():
            size = self.problem.choices[n][k].memory_bytes
            if column is None:
                fixed += size
            elif size:
                terms.append((column, size / max(limit_bytes, 1.0)))
        room = (limit_bytes - fixed) / max(limit_bytes, 1.0)
        if not terms:
            if room < 0:
                raise NoAssignment
            return
        self.lp.addConstraint(pulp.LpConstraint(terms, pulp.LpConstraintLE, rhs=room))

    @property
    def objective_seconds(self) -> float:
        value: Any = pulp.value(self.lp.objective)  # a number once solved; pulp's types allow expressions
        return (self.constant + (value or 0.0)) / _SCALE

    def run(self, *, as_mip: bool, time_limit_seconds: float | None) -> dict[tuple[int, int], float]:
        """Values of x.

        Raises:
            NoAssignment: infeasible.
        """
        if self.terms:
            for column in self.x.values():
                if column is not None:
                    column.cat = pulp.LpInteger if as_mip else pulp.LpContinuous
            run_solver(self.lp, as_mip=as_mip, time_limit_seconds=time_limit_seconds)
            self.is_proven = self.lp.sol_status == pulp.LpSolutionOptimal
        return {key: 1.0 if column is None else float(column.varValue or 0.0) for key, column in self.x.items()}


def _by_state(items: Iterable[tuple[State, int]]) -> dict[State, list[int]]:
    found: dict[State, list[int]] = {}
    for state, k in items:
        found.setdefault(state, []).append(k)
    return found
