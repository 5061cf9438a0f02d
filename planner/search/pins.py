"""What the user fixed of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...cost_models.errors import AutoparError
from ..checkpointing import POLICIES, parse_checkpoints
from ..schedules import get_schedule
from ..sharding.mesh import AXES
from ..sharding.shares import why_even_under
from ..zero import FREED, check_zero, parse_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the user fixed; None is free. `mesh` holds the axes that are fixed."""

    mesh: Mapping[str, int]
    microbatch_size: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    zero: int | str | None = None  # of all blocks, or "h.{0..3}=2,*=3"
    activation_checkpoint: str | None = None  # of all blocks, or "h.{0..2}=full,h.3=selective"
    zero_shard_size: int | None = None  # ranks (of dp, all of cp) that ZeRO-2 and ZeRO-3 split over
    batch_shares: tuple[int, ...] | None = None  # of each dp rank, in any unit

    def check(self) -> None:
        """Refuse values that no plan can have.

        Raises:
            AutoparError: the value and the valid ones.
        """
        for name, size in self.mesh.items():
            if name not in AXES:
                raise AutoparError(f"there is no mesh axis {name!r}", fix=f"axes are {', '.join(AXES)}")
            if size < 1:
                raise AutoparError(f"{name}={size} is no size", fix="sizes start at 1")
        if isinstance(self.zero, str):
            parse_zero(self.zero, where=f"--zero {self.zero}")
        elif self.zero is not None:
            check_zero(self.zero)
        checkpoint = self.activation_checkpoint or "none"
        if checkpoint not in POLICIES:
            parse_checkpoints(checkpoint, where=f"--activation-checkpoint {checkpoint}")
        if self.schedule is not None:
            get_schedule(self.schedule)
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise AutoparError(f"{self.stages_per_rank} stages per rank are none", fix="give a positive number")
        if self.zero_shard_size is not None and self.zero in (0, 1):
            raise AutoparError(
                f"zero={self.zero} and zero-shard-size={self.zero_shard_size} contradict each other",
                fix="only ZeRO-2 and ZeRO-3 split over a part of the ranks: pin --zero 2 or 3, or neither",
            )

        self._check_shares()

    def _check_shares(self) -> None:
        if self.batch_shares is None:
            return
        dp, shares = self.mesh.get("dp", len(self.batch_shares)), written_shares(self.batch_shares)
        if min(self.batch_shares, default=0) < 1 or len(self.batch_shares) < 2:
            fix = "give each dp rank a whole number of at least 1, as in 3,1"
            raise AutoparError(f"batch-shares={shares} are no shares of two or more dp ranks", fix=fix)
        if dp != len(self.batch_shares):
            raise AutoparError(
                f"batch-shares={shares} names {len(self.batch_shares)} dp ranks, and dp={dp}",
                fix=f"give {dp} shares, or leave one of the two out",
            )
        zero = FREED if isinstance(self.zero, str) else self.zero or 0
        if self.is_uneven and (reason := why_even_under(zero, self.stages_per_rank or 1)):
            pins = f"zero={self.zero}" + (f" with stages-per-rank={self.stages_per_rank}" if zero < FREED else "")
            raise AutoparError(f"batch-shares={shares} and {pins} clash: {reason}", fix="let one of them free")

    @property
    def is_uneven(self) -> bool:
        """Whether dp ranks are to take different shares of the batch."""
        return len({*(self.batch_shares or ())}) > 1

    def described(self) -> dict[str, str]:
        found = {}
        if self.mesh:
            found["mesh"] = ",".join(f"{name}={self.mesh[name]}" for name in AXES if name in self.mesh)
        names = ("microbatch_size", "schedule", "stages_per_rank", "zero", "activation_checkpoint", "zero_shard_size")
        for name in names:
            value = getattr(self, name)
            if value is not None:
                found[name.replace("_", "-")] = str(value)
        if self.batch_shares is not None:
            found["batch-shares"] = written_shares(self.batch_shares)
        return found


def written_shares(shares: Sequence[int]) -> str:
    """As an option has them."""
    return ",".join(map(str, shares))
