"""A placement problem over all axes -> the columns x and e of its linear program, and the rows that make x legal.

Sets, x, e as in `placements_ilp.py`. Beside that problem's own rows:

    sum_n sum_o x[n,o] [o splits n on axis a] >= 1         each axis a of more than one rank

The other parts of the step (`step_units.py`, `step_parameters.py`, `step_model.py`) add their columns and rows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy

import pulp

from ..capture.graph import Kind, TensorType
from ..sharding.placement import local_type
from .assignment import Choice, Group, NoAssignment
from .linear import Linear, add, scaled
from .problem import Built, State, state_of
from .space import Space
from .step_uses import labels_of, layout_of, splits

SCALE = 1e6  # the solver sees microseconds
MIB = float(1 << 20)  # columns of bytes count MiB


class StepColumns:
    """The program under construction: `alive` says which choices of each vertex it may take."""

    def __init__(self, space: Space, built: Built, alive: Sequence[Sequence[int]]) -> None:
        self.space, self.built = space, built
        self.lp = pulp.LpProblem("step", pulp.LpMinimize)
        self.num_columns = 0
        self.alive = [tuple(ks) for ks in alive]
        self.x: dict[tuple[int, int], pulp.LpVariable | None] = {}
        self.vertex = {key: n for n, keys in enumerate(built.keys) for key in keys}
        self._add_choices()
        self.wanted: list[list[dict[tuple[State, State], pulp.LpVariable | None]]] = []
        for group in built.problem.groups:
            self.wanted.append(self._add_group(group))
        self._must_split()

    def forked(self) -> StepColumns:
        """The program so far; what is added to it stays its own."""
        found = copy(self)
        found.lp = self.lp.copy()
        return found

    def column(self, prefix: str, most: float | None = None) -> pulp.LpVariable:
        """A new column from 0 to `most`."""
        self.num_columns += 1
        return self.lp.add_variable(f"{prefix}{self.num_columns:06d}", 0, most)

    def row(
        self, terms: Mapping[pulp.LpVariable | None, float], sense: int, right: float = 0.0
    ) -> pulp.LpConstraint | None:
        """Add sum of terms <=, = or >= right; None where there are no columns and it holds.

        Raises:
            NoAssignment: there are no columns and it does not hold.
        """
        columns = [(column, factor) for column, factor in terms.items() if column is not None and factor]
        right -= terms.get(None, 0.0)
        if not columns:
            if (sense == pulp.LpConstraintGE and right > 1e-9) or (sense == pulp.LpConstraintLE and right < -1e-9):
                raise NoAssignment
            return None
        row = pulp.LpConstraint(pulp.LpAffineExpression(columns), sense, rhs=right)
        self.lp.addConstraint(row)
        return row

    def at_least(self, column: pulp.LpVariable, terms: Linear) -> None:
        """Add column >= terms."""
        self.row(add({column: 1.0}, terms, -1.0), pulp.LpConstraintGE)

    def largest(self, prefix: str, parts: Sequence[Linear]) -> Linear:
        """A column that is at least every part; the part itself where there is but one."""
        parts = [part for part in parts if any(part.values())]
        if not parts:
            return {}
        if len(parts) == 1:
            return parts[0]
        column = self.column(prefix)
        for part in parts:
            self.at_least(column, part)
        return {column: 1.0}

    def _add_choices(self) -> None:
        for n, ks in enumerate(self.alive):
            if len(ks) == 1:
                self.x[n, ks[0]] = None
                continue
            columns = [self.column("x", 1) for _ in ks]
            self.x.update(((n, k), column) for k, column in zip(ks, columns, strict=True))
            self.row(dict.fromkeys(columns, 1.0), pulp.LpConstraintEQ, 1.0)

    def chosen(self, n: int, amount: Callable[[Choice], float]) -> Linear:
        """sum_o amount(o) x[n,o]"""
        choices = self.built.problem.choices[n]
        return self.weighted(n, [amount(choices[k]) for k in self.alive[n]])

    def weighted(self, n: int, amounts: Iterable[float]) -> Linear:
        """The same of an amount for every choice that is alive."""
        return {self.x[n, k]: amount for k, amount in zip(self.alive[n], amounts, strict=True) if amount}

    def _add_group(self, group: Group) -> list[dict[tuple[State, State], pulp.LpVariable | None]]:
        """e[g,k,p,r] by consumer; None where there is no choice."""
        choices = self.built.problem.choices
        producer, output = group.producer
        made: dict[State, list[int]] = {}
        for k in self.alive[producer]:
            made.setdefault(state_of(choices[producer][k].outputs[output]), []).append(k)
        found = []
        for vertex, position in group.consumers:
            wanted: dict[State, list[int]] = {}
            for k in self.alive[vertex]:
                wanted.setdefault(state_of(choices[vertex][k].operands[position]), []).append(k)
            edges: dict[tuple[State, State], pulp.LpVariable | None] = {
                (p, r): None for p in made for r in wanted if (p, r) in group.prices
            }
            if not edges:
                raise NoAssignment(self.built.problem.names[vertex])
            if len(made) > 1 or len(wanted) > 1:
                edges = {key: self.column("e", 1) for key in edges}
                for side, states, n in ((0, made, producer), (1, wanted, vertex)):
                    rows: dict[State, Linear] = {state: {} for state in states}
                    for key, column in edges.items():
                        rows[key[side]][column] = 1.0
                    for state, ks in states.items():
                        self.row(add(rows[state], {self.x[n, k]: -1.0 for k in ks}), pulp.LpConstraintEQ)
            found.append(edges)
        return found

    def _must_split(self) -> None:
        """Every axis of several ranks splits some operation."""
        for position, axis in enumerate(self.built.axes):
            if axis.is_time:
                continue
            row: Linear = {}
            for n, keys in enumerate(self.built.keys):
                t, name = keys[0]
                if t == self.space.prelude or self.space.graph.templates[t].by_name[name].kind is not Kind.OP:
                    continue
                add(row, self.chosen(n, lambda choice, i=position: float(splits(labels_of(choice)[i]))))
            self.row(row, pulp.LpConstraintGE, 1.0)

    def value(self, group: Group) -> TensorType:
        """The global type of what a group's producer makes."""
        vertex, output = group.producer
        t, name = self.built.keys[vertex][0]
        return self.space.graph.templates[t].by_name[name].outputs[output]

    def local_bytes(self, value: TensorType, choice: Choice, output: int = 0) -> float:
        """Bytes of an output on one rank."""
        layout = layout_of(state_of(choice.outputs[output]), self.built.axes)
        return float(local_type(value, layout, self.built.axes).num_bytes)

    def chord(self, terms: Linear, seconds: Callable[[int], float]) -> Linear:
        """A price of a sum of bytes from below: the line to the largest it can be."""
        most = self.largest_sum(terms)
        return {} if most <= 0 else scaled(terms, seconds(int(most)) * SCALE / most)

    def largest_sum(self, terms: Linear) -> float:
        """The largest value of a sum over choices, of which each vertex takes one."""
        best: dict[int, float] = {}
        total = terms.get(None, 0.0)
        vertex_of = {column: n for (n, _), column in self.x.items() if column is not None}
        for column, amount in terms.items():
            if column is not None:
                n = vertex_of[column]
                best[n] = max(best.get(n, 0.0), amount)
        return total + sum(best.values())
