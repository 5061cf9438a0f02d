"""What a search has found so far, and the time that it has left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from .answer import Candidate


@dataclass
class Record:
    """`deadline`: on the monotonic clock. `best_seconds`: of the best plan that fits, inf without one."""

    deadline: float = inf
    found: list[Candidate] = field(default_factory=list, init=False)
    best_seconds: float = field(default=inf, init=False)

    def add(self, candidates: Sequence[Candidate]) -> None:
        """Keep what has been priced."""
        for candidate in candidates:
            self.found.append(candidate)
            if candidate.fits and candidate.cost.is_simulated:
                self.best_seconds = min(self.best_seconds, candidate.cost.step_seconds)

    @property
    def fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.found if candidate.fits and candidate.cost.is_simulated]

    @property
    def seconds_left(self) -> float | None:
        """Of the time limit, None without one."""
        return None if self.deadline == inf else max(0.0, self.deadline - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether the time is up; not before there is a plan."""
        return self.best_seconds < inf and self.seconds_left == 0
