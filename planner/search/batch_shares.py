"""Seconds of every dp rank by its number of microbatches -> the numbers with which the slowest is done first.

    min max_d T_d(m_d)   s.t.   sum_d m_d = M,   m_d in {a, a + g, a + 2g, ...},   m_d <= what d has memory for

T_d grows with m_d. So under a limit of seconds each rank takes as many as it can, and the smallest limit under which
all M are taken is some T_d(m): found by bisection of m, for each kind of rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Sharing:
    """Microbatches to deal out. `kinds`: by dp rank, equal where ranks are alike; `seconds` and `fits` of a kind.

    `least`, `step`: the numbers that a schedule can run; `fits` holds for all numbers below one that it holds for.
    """

    total: int
    kinds: tuple[int, ...]
    seconds: Callable[[int, int], float]
    fits: Callable[[int, int], bool]
    least: int = 1
    step: int = 1

    @cached_property
    def _most(self) -> dict[int, int]:
        """What each kind has memory for, of what the others leave at most; 0 where not even the least fits."""
        room = self.total - (len(self.kinds) - 1) * self.least
        return {kind: self._largest(kind, room, self.fits) for kind in sorted({*self.kinds})}

    def _largest(self, kind: int, most: int, holds: Callable[[int, int], bool]) -> int:
        """The largest number up to `most` that something holds for, 0 if none."""
        low, high = -1, (most - self.least) // self.step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if holds(kind, self.least + middle * self.step) else (low, middle - 1)
        return 0 if low < 0 else self.least + low * self.step

    def _within(self, limit: float) -> dict[int, int]:
        """As many as each kind can take in so many seconds."""

        def holds(kind: int, count: int) -> bool:
            return self.seconds(kind, count) <= limit

        return {kind: self._largest(kind, most, holds) if most else 0 for kind, most in self._most.items()}

    def _suffices(self, limit: float) -> bool:
        counts = self._within(limit)
        return all(counts.values()) and sum(counts[kind] for kind in self.kinds) >= self.total

    def best(self) -> tuple[int, ...] | None:
        """The microbatches of each dp rank; None where memory leaves no room for all of them."""
        limits: list[float] = []
        for kind, most in self._most.items():
            if not most or not self._suffices(self.seconds(kind, most)):
                continue
            low, high = 0, (most - self.least) // self.step
            while low < high:
                middle = (low + high) // 2
                if self._suffices(self.seconds(kind, self.least + middle * self.step)):
                    high = middle
                else:
                    low = middle + 1
            limits.append(self.seconds(kind, self.least + low * self.step))
        if not limits:
            return None
        counts = self._within(min(limits))
        shares = [counts[kind] for kind in self.kinds]
        while sum(shares) > self.total:
            taken = (d for d, count in enumerate(shares) if count > self.least)
            slowest = max(taken, key=lambda d: (self.seconds(self.kinds[d], shares[d]), d))
            shares[slowest] -= self.step
        return tuple(shares)


def pinned_shares(ratio: Sequence[int], total: int) -> tuple[int, ...] | None:
    """So many microbatches in these proportions; None where that is no whole number."""
    parts = sum(ratio)
    return None if total % parts else tuple(total // parts * part for part in ratio)
