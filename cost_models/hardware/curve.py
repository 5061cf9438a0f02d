"""A measured curve: bytes -> seconds, straight between the sizes that were measured."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from ..units import MICROSECOND
from .toml_file import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Seconds of one kernel or message by its bytes. Beyond the last size it goes on as between the last two.

    Raises:
        ValueError: fewer than two sizes, sizes that do not rise, or times that are not positive.
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.num_bytes) != len(self.seconds) or len(self.num_bytes) < 2:
            raise ValueError("a curve has two or more sizes and a time for each")
        if any(low >= high for low, high in zip(self.num_bytes, self.num_bytes[1:], strict=False)):
            raise ValueError("the sizes of a curve rise")
        if min(self.seconds) <= 0 or self.num_bytes[0] <= 0:
            raise ValueError("sizes and times of a curve are positive")

    def at(self, num_bytes: float) -> float:
        """Seconds; what is smaller than the smallest size takes as long as that."""
        if num_bytes <= self.num_bytes[0]:
            return self.seconds[0]
        right = min(bisect_left(self.num_bytes, num_bytes), len(self.num_bytes) - 1)
        low, high = self.num_bytes[right - 1], self.num_bytes[right]
        slope = (self.seconds[right] - self.seconds[right - 1]) / (high - low)
        # Noise may leave the last stretch flat or falling: never faster than the best rate of the whole curve.
        if num_bytes > high:
            return self.seconds[right] + (num_bytes - high) * max(slope, self.least_seconds_per_byte)
        return self.seconds[right - 1] + (num_bytes - low) * slope

    @property
    def least_seconds_per_byte(self) -> float:
        """The best rate that any size reaches."""
        return min(seconds / num_bytes for num_bytes, seconds in zip(self.num_bytes, self.seconds, strict=True))


def parse_curve(table: Table) -> Curve:
    """A curve from `bytes` and `microseconds`, two lists of equal length.

    Raises:
        HardwareError: lists that are no curve.
    """
    table.check_keys(("bytes", "microseconds"))
    sizes, times = table.numbers("bytes"), table.numbers("microseconds")
    try:
        return Curve(num_bytes=sizes, seconds=tuple(time * MICROSECOND for time in times))
    except ValueError as error:
        raise table.fail("bytes", f"and microseconds are no curve: {error}") from error
