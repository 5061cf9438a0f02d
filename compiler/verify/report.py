"""What a verification found, as data and as lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...planner.zero import zero_text

# How many differences of one kind are written out.
MAX_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """One compared value. `relative` is |got - want| / (|want| + floor) in norms, what the tolerance bounds."""

    what: str  # "loss" | "gradient" | "buffer" | "sgd" | "adamw" | "norm"
    name: str
    rank: int
    relative: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveMismatch:
    """A kind of collective whose count on a rank is not the planned one. `num_bytes` in the dtypes of the graph."""

    rank: int
    axis: str
    op: str
    num_bytes: int
    planned: int
    recorded: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {self.op} over {self.axis}, {self.num_bytes} bytes: "
            f"planned {self.planned}, recorded {self.recorded}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """The first rank that failed: the last line of its error and the whole traceback."""

    rank: int
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The answer of `verify`.

    `worst`: largest relative error by kind of value, over all ranks. `collectives`: how many collectives the recorded
    step had, over all ranks. `notes`: what the check does not cover.
    """

    mesh: Mapping[str, int]
    microbatches: int
    schedule: str
    zero: int
    activation_checkpoint: str
    dtype: str
    tolerance: float
    seconds: float
    num_values: int
    worst: Mapping[str, float]
    bad_values: tuple[ValueCheck, ...] = ()
    collectives: int = 0
    mismatches: tuple[CollectiveMismatch, ...] = ()
    failure: RankFailure | None = None
    notes: tuple[str, ...] = ()
    batch_shares: tuple[int, ...] = ()  # as in the plan
    zero_by_block: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.bad_values or self.mismatches or self.failure) and self.num_values > 0

    @property
    def worst_relative_error(self) -> float:
        return max(self.worst.values(), default=0.0)

    def lines(self, *, verbose: bool = False) -> tuple[str, ...]:
        """The report for people; `verbose` adds the traceback of a failed rank and every difference."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items())
        microbatches = ",".join(map(str, self.batch_shares or (self.microbatches,)))
        zero = zero_text(self.zero, self.zero_by_block)
        found = [
            f"{mesh} microbatches={microbatches} schedule={self.schedule} zero={zero} "
            f"activation-checkpoint={self.activation_checkpoint} dtype={self.dtype}"
        ]
        if self.failure is not None:
            found.append(f"FAILED: rank {self.failure.rank}: {self.failure.error}")
            if verbose:
                found.extend(self.failure.traceback.splitlines())
        if self.num_values:
            errors = ", ".join(f"{what} {error:.1e}" for what, error in self.worst.items())
            found.append(
                f"values: {self.num_values} compared, tolerance {self.tolerance:.0e}; worst relative error: {errors}"
            )
            found.append(f"collectives: {self.collectives} recorded in the second step")
        limit = None if verbose else MAX_LINES
        for what, differences in (
            ("values differ", [f"{v.what} {v.name} on rank {v.rank}: {v.relative:.2e}" for v in self.bad_values]),
            ("collectives differ", [str(mismatch) for mismatch in self.mismatches]),
        ):
            if differences:
                found.append(f"{what} ({len(differences)}):")
                found.extend(f"  {line}" for line in differences[:limit])
                if limit is not None and len(differences) > limit:
                    found.append(f"  ... and {len(differences) - limit} more (--verbose lists all)")
        found.extend(f"note: {note}" for note in self.notes)
        found.append("verified" if self.ok else "NOT verified")
        return tuple(found)
