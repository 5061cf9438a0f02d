"""Pins that no mesh satisfies -> the few of them that clash, and how to mend it.

A pin is left out for good where the others still allow nothing: what remains cannot be smaller. One pin that remains
contradicts the model, the batch or the number of GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ...cost_models.errors import AutoparError
from ..sharding.mesh import AXES, Mesh
from .batch import BatchSplit
from .candidates import possible_meshes
from .pins import Pins, written_shares
from .space import Space

_FIELDS = ("zero", "zero_shard_size", "schedule", "stages_per_rank", "microbatch_size", "batch_shares")
_MOST_SIZES = 8


def meshes_under(space: Space, batch: BatchSplit, gpus: int, pins: Pins) -> tuple[Mesh, ...]:
    """As `meshes`, with an error that names which pins clash.

    Raises:
        AutoparError: the pins that clash, why, and what to let go or choose.
    """
    found, _ = possible_meshes(space, batch, gpus, pins)
    if not found:
        raise _Clash(space, batch, gpus).named(pins)
    return found


class _Clash:
    """What the pins are measured by."""

    def __init__(self, space: Space, batch: BatchSplit, gpus: int) -> None:
        self.space, self.batch, self.gpus = space, batch, gpus

    def _allows(self, pins: Pins) -> bool:
        return bool(possible_meshes(self.space, self.batch, self.gpus, pins)[0])

    def named(self, pins: Pins) -> AutoparError:
        """The error of the smallest set of pins that still clashes."""
        names = [name for name in (*AXES, *_FIELDS) if _value(pins, name) is not None]
        for name in names:
            if not self._allows(without := _without(pins, name)):
                pins = without
        names = [name for name in names if _value(pins, name) is not None]
        graph = self.space.graph
        where = f"{graph.name}, {self.gpus} GPUs, batch {graph.batch_size}"
        written = [_written(pins, name) for name in names]
        # Of reasons that say as much the last: they are listed from the smallest axes on.
        reason = max(reversed(self._reasons(pins, names)), key=lambda text: _mentions(text, pins, names), default="")
        if not names:
            what = f"no mesh of {self.gpus} GPUs can run this step: {reason}"
            return AutoparError(what, where=where, fix="use fewer GPUs or more samples")
        if len(names) == 1:
            reason = reason or f"no mesh with {written[0]} has {self.gpus} ranks"
            what = reason if written[0] in reason else f"{written[0]} cannot be: {reason}"
            return AutoparError(what, where=where, fix=self._choices(pins, names[0]))
        listed = f"{', '.join(written[:-1])} and {written[-1]}"
        reason = reason or f"no mesh with {','.join(written)} has {self.gpus} ranks"
        fix = f"leave one of them free: {' or '.join(map(_option, dict.fromkeys(names)))}"
        return AutoparError(f"{listed} contradict each other: {reason}", where=where, fix=fix)

    def _reasons(self, pins: Pins, names: list[str]) -> list[str]:
        """Why nothing is allowed; first of all what is no reason with any of the pins left out."""

        def given(pins: Pins) -> tuple[str, ...]:
            return possible_meshes(self.space, self.batch, self.gpus, pins)[1]

        every = given(pins)
        usual = {reason for name in names for reason in given(_without(pins, name))}
        return [reason for reason in every if reason not in usual] or list(every)

    def _choices(self, pins: Pins, name: str) -> str:
        """Values of a pin that something can be done with."""
        option = _option(name)
        if name == "batch_shares":
            sums = ", ".join(map(str, self._sums(pins)[:_MOST_SIZES]))
            return f"shares of {option} can add up to {sums}; or leave it out" if sums else f"leave {option} out"
        if name not in AXES:
            sizes = [size for size in self._sizes(name) if self._allows(replace(pins, **{name: size}))]
            shown = ", ".join(map(str, sizes[:_MOST_SIZES]))
            return f"{option} can be {shown}, or is left out" if shown else f"leave {option} out"
        free = possible_meshes(self.space, self.batch, self.gpus, _without(pins, name))[0]
        sizes = sorted({mesh.sizes[name] for mesh in free})
        shown = ", ".join(map(str, sizes[:_MOST_SIZES])) + (", ..." if len(sizes) > _MOST_SIZES else "")
        return f"{name} can be {shown or 1}, or is left out of {option}"

    def _sums(self, pins: Pins) -> list[int]:
        """What the shares of as many dp ranks may add up to."""
        others = len(pins.batch_shares or ()) - 1
        return [
            total
            for total in range(others + 1, self.space.graph.batch_size + 1)
            if self.space.graph.batch_size % total == 0
            and self._allows(replace(pins, batch_shares=(total - others, *[1] * others)))
        ]

    def _sizes(self, name: str) -> Iterator[int]:
        if name == "microbatch_size":
            batch = self.space.graph.batch_size
            yield from (size for size in range(1, min(batch, 512) + 1) if batch % size == 0)
        elif name in ("stages_per_rank", "zero_shard_size"):
            yield from (1, 2, 3, 4, 8)
        elif name == "zero":
            yield from (0, 1, 2, 3)


def _value(pins: Pins, name: str) -> object:
    return pins.mesh.get(name) if name in AXES else getattr(pins, name)


def _without(pins: Pins, name: str) -> Pins:
    if name in AXES:
        return replace(pins, mesh={axis: size for axis, size in pins.mesh.items() if axis != name})
    return replace(pins, **{name: None})


def _written(pins: Pins, name: str) -> str:
    value = _value(pins, name)
    text = written_shares(value) if isinstance(value, tuple) else str(value)
    return f"{name.replace('_', '-')}={text}"


def _option(name: str) -> str:
    return f"--mesh {name}" if name in AXES else f"--{name.replace('_', '-')}"


def _mentions(text: str, pins: Pins, names: list[str]) -> int:
    """How many of the pins a reason speaks of."""
    values = {str(_value(pins, name)) for name in names} | {name.replace("_", "-") for name in names}
    return sum(bool(re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text)) for value in values)


__all__ = ["meshes_under"]
