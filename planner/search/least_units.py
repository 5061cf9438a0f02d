"""The units of a model -> what no cut into stages does without of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...cost_models.memory import FRAGMENTATION_FRACTION
from ..checkpointing import POLICIES, Checkpointing
from .least_recompute import Recomputed
from .stage_costs import StageCosts

_BYTES_OF_ROUNDING = 64.0  # of the shares of a unit


class _Alike(NamedTuple):
    """What units have in common: a template (-1 where units hold the same tensors), and by policy the bytes that they
    keep at least of a microbatch and the seconds they take."""

    template: int
    kept_bytes: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class LeastUnits:
    """Bytes and seconds of units of one placement on one mesh, those alike once."""

    costs: StageCosts
    _counts: dict[tuple[int, Checkpointing], Counter[tuple[float, float, float]]] = field(
        default_factory=dict, init=False
    )
    _recomputed: dict[tuple[int, tuple[Checkpointing, ...]], Counter[Recomputed]] = field(
        default_factory=dict, init=False
    )

    def counts(self, zero: int, recompute: Checkpointing) -> Counter[tuple[float, float, float]]:
        """How many units but the prelude there are by what their stage holds of them throughout, at least (of tied
        ones another may), and keeps of one microbatch before and after all has been made again, fragmented."""
        key = zero, recompute
        if key not in self._counts:
            found = self._counts[key] = Counter()
            for states, unit, count in self._kinds(zero, (recompute, "none")):
                kept, remade = unit.kept_bytes
                found[states, kept, remade] += count
        return self._counts[key]

    def recomputed(self, zero: int, policies: tuple[Checkpointing, ...]) -> Counter[Recomputed]:
        """How many units but the prelude there are by what they take at least under each policy."""
        key = zero, policies
        if key not in self._recomputed:
            found = self._recomputed[key] = Counter()
            for states, unit, count in self._kinds(zero, (*policies, "none")):
                *kept, remade = unit.kept_bytes
                found[Recomputed(states, remade, tuple(kept), unit.seconds[:-1])] += count
        return self._recomputed[key]

    def _kinds(self, zero: int, policies: tuple[Checkpointing, ...]) -> Iterator[tuple[float, _Alike, int]]:
        """What a stage holds at least of every kind of unit, the kind, and how many there are."""
        kinds, costs = self.costs.kinds, self.costs
        known, key = costs.prices.shared.costs, ("alike", kinds, costs.local, policies)
        if key not in known:
            units = range(1, len(kinds.templates))
            templates = (-1 if index in kinds.sharing else kinds.templates[index] for index in units)
            kept = zip(*map(self._kept, policies), strict=True)
            seconds = zip(*(costs.unit_seconds(policy).through for policy in policies), strict=True)
            first: dict[_Alike, int] = {}
            counts: Counter[_Alike] = Counter()
            for index, alike in zip(units, map(_Alike, templates, kept, seconds), strict=True):
                first.setdefault(alike, index)
                counts[alike] += 1
            known[key] = [(first[alike], alike, count) for alike, count in counts.items()]
        for index, alike, count in known[key]:
            yield 0.0 if index in kinds.sharing else self._states(index, zero), alike, count

    def _states(self, index: int, zero: int) -> float:
        costs = self.costs
        stored, held = costs.held(index, index + 1, stored=True), costs.held(index, index + 1)
        still = costs.memory.without_activations(0, held, stored, zero)
        states = still.parameters + still.gradients + still.optimizer + still.master_weights
        moving = costs.memory.held_whole_bytes(held, zero)
        return max(0.0, states + moving * (1 + FRAGMENTATION_FRACTION) - _BYTES_OF_ROUNDING)

    def _kept(self, recompute: Checkpointing) -> tuple[float, ...]:
        costs = self.costs
        known, key = costs.prices.shared.costs, ("first kept", costs.kinds, costs.local)
        if key not in known:
            kept = costs.bytes.first_kept_bytes(POLICIES)
            known[key] = {
                policy: tuple(size * (1 + FRAGMENTATION_FRACTION) for size in sizes)
                for policy, sizes in zip(POLICIES, kept, strict=True)
            }
        if isinstance(recompute, str):
            return known[key][recompute]
        return tuple(known[key][policy][index] for index, policy in enumerate(recompute[1:]))
