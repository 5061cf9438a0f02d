"""A linear expression of columns: a dict of column -> factor, where None holds the constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulp

Linear = dict[pulp.LpVariable | None, float]


def add(into: Linear, other: Mapping[pulp.LpVariable | None, float], factor: float = 1.0) -> Linear:
    """Add `factor * other` to `into`, in place."""
    for column, amount in other.items():
        into[column] = into.get(column, 0.0) + factor * amount
    return into


def sum_of(parts: Sequence[tuple[Mapping[pulp.LpVariable | None, float], float]]) -> Linear:
    """The sum of factor * part, as a new expression."""
    total: Linear = {}
    for part, factor in parts:
        add(total, part, factor)
    return total


def scaled(terms: Linear, factor: float) -> Linear:
    return {column: amount * factor for column, amount in terms.items()}
