"""A cut, a schedule and a ZeRO stage that lack memory -> the blocks that run again, as few seconds of them as it takes.

Ranks of a pipeline do not depend on each other here. Of one rank, with b its blocks, t(b) and s(b) their template and
stage, p the policy of a block (none, selective, full):

    a_tp   seconds that policy p adds to the backward of a block of template t
    k_tp   bytes of a microbatch that it spares
    w_tp   bytes that the block works with
    n_s    microbatches that stage s keeps at once and has not run again: of a split backward those before their I

    min  sum_b a_t(b)p(b)
    s.t. sum_b n_s(b) k_t(b)p(b) >= activations without recomputation - room for them beside W      (memory)
         w_t(b)p(b) <= W                                                                            (scratch)
         p(b) = p(b')  for calls b, b' of one module

Blocks of a template differ in n_s alone, so that by exchange the ones with most microbatches are those that spare most:
sorted by n_s, blocks 1 .. i are full, i+1 .. j selective, and the rest none. With P_m the sum of the first m of the n_s
a template spares

    k_t,full P_i + k_t,selective (P_j - P_i)      for      a_t,full i + a_t,selective (j - i)

which leaves two integers a template. Templates are put together as fronts of (bytes, seconds) that nothing beats, but
for the one with most blocks: given i its least j follows. W is tried at every w_tp. Within a stage the first blocks run
again. What stages keep is nearly linear in the blocks (neighbours may share memory): the evaluator has the last word,
and where it finds a rank too full the room of that rank is less by as much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import inf

from ...cost_models.memory import FRAGMENTATION_FRACTION, overhead_bytes
from ..blocks import is_block
from ..capture.graph import ModelGraph
from ..checkpointing import POLICIES, Checkpointing, in_short, policies_of
from ..schedules import Alive, kept_at_once, stages_by_rank
from ..zero import Zero, highest
from .evaluate import Evaluator

_NONE, _SELECTIVE, _FULL = POLICIES
_MOST_POINTS = 2000  # of a front; more are thinned out evenly

# (bytes spared, seconds added, per template (i, j) as above)
_Point = tuple[float, float, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks of a template on one rank, most microbatches in flight first. By policy: what one block adds in
    seconds, spares of a microbatch's bytes, and works with."""

    units: tuple[int, ...]
    in_flight: tuple[int, ...]
    seconds: Mapping[str, float]
    spared_bytes: Mapping[str, float]
    working_bytes: Mapping[str, int]

    def policies(self, working_bytes: float) -> tuple[str, ...]:
        """Those other than none that work with so much and spare something."""
        return tuple(p for p in POLICIES[1:] if self.working_bytes[p] <= working_bytes and self.spared_bytes[p] > 0)

    def points(self, working_bytes: float) -> Iterator[_Point]:
        """Every (i, j)."""
        allowed = self.policies(working_bytes)
        sums = (0, *accumulate(self.in_flight))
        for i in range(len(self.units) + 1) if _FULL in allowed else (0,):
            for j in range(i, len(self.units) + 1) if _SELECTIVE in allowed else (i,):
                spared = self.spared_bytes[_FULL] * sums[i] + self.spared_bytes[_SELECTIVE] * (sums[j] - sums[i])
                yield spared, self.seconds[_FULL] * i + self.seconds[_SELECTIVE] * (j - i), ((i, j),)

    def least(self, needed_bytes: float, working_bytes: float) -> tuple[float, tuple[int, int]] | None:
        """The fewest seconds that spare so many bytes, and their (i, j)."""
        if needed_bytes <= 0:
            return 0.0, (0, 0)
        allowed = self.policies(working_bytes)
        count, sums = len(self.units), (0, *accumulate(self.in_flight))
        best: tuple[float, tuple[int, int]] | None = None
        for i in range(count + 1) if _FULL in allowed else (0,):
            j, left = i, needed_bytes - self.spared_bytes[_FULL] * sums[i]
            if left > 0:
                if _SELECTIVE not in allowed:
                    continue
                j = bisect_left(sums, sums[i] + left / self.spared_bytes[_SELECTIVE], lo=i)
            if j <= count:
                found = self.seconds[_FULL] * i + self.seconds[_SELECTIVE] * (j - i), (i, j)
                best = found if best is None else min(best, found)
        return best

    def assign(self, found: list[str], chosen: tuple[int, int]) -> None:
        """Write the policies of (i, j) into those of all units."""
        i, j = chosen
        for position, unit in enumerate(self.units):
            found[unit] = _FULL if position < i else _SELECTIVE if position < j else _NONE


def least_seconds(
    groups: Sequence[Blocks], needed_bytes: float, working_bytes: float
) -> tuple[float, tuple[tuple[int, int], ...]] | None:
    """The fewest seconds that spare so many bytes, and (i, j) of every group; None where all blocks spare less."""
    if not groups:
        return (0.0, ()) if needed_bytes <= 0 else None
    order = sorted(range(len(groups)), key=lambda g: len(groups[g].units))
    front: list[_Point] = [(0.0, 0.0, ())]
    for g in order[:-1]:
        points = list(groups[g].points(working_bytes))
        front = _undominated([(a + c, b + d, (*e, *f)) for a, b, e in front for c, d, f in points])
    best: tuple[float, tuple[tuple[int, int], ...]] | None = None
    for spared, seconds, chosen in front:
        last = groups[order[-1]].least(needed_bytes - spared, working_bytes)
        if last is not None:
            found = seconds + last[0], (*chosen, last[1])
            best = found if best is None else min(best, found)
    if best is None:
        return None
    of_group = dict(zip(order, best[1], strict=True))
    return best[0], tuple(of_group[g] for g in range(len(groups)))


def _undominated(points: list[_Point]) -> list[_Point]:
    """Those that no other beats in both, with the bytes growing."""
    found: list[_Point] = []
    least = inf
    for point in sorted(points, key=lambda point: (-point[0], point[1])):
        if point[1] < least:
            least = point[1]
            found.append(point)
    if len(found) > _MOST_POINTS:
        step = len(found) / _MOST_POINTS
        found = [found[int(k * step)] for k in range(_MOST_POINTS - 1)] + [found[-1]]
    return found[::-1]


@dataclass(frozen=True)
class Recomputation:
    """Recomputation for one cut. By pipeline rank `hbm_bytes`, and `spare_seconds`: what may be added to a microbatch's
    part there before the plan is too slow to be wanted."""

    evaluator: Evaluator
    stages: tuple[tuple[int, int], ...]
    schedule: str
    zero: Zero
    hbm_bytes: tuple[int, ...]
    spare_seconds: tuple[float, ...]
    _of_rank_groups: dict[tuple[int, tuple[str, ...]], list[Blocks]] = field(default_factory=dict, init=False)

    def least(self, missing_bytes: Sequence[int]) -> Checkpointing | None:
        """The policies that add the fewest seconds; None where none fits. Up to a rank where it is more than it may be:
        those behind it then run nothing again.

        `missing_bytes`: by rank, what a former answer turned out to need beyond the memory there is.
        """
        answers = [self._least(policy, missing_bytes) for policy in (self._allowed if self._repeated else (_NONE,))]
        found = [answer for answer in answers if answer is not None]
        if not found:
            return None
        return in_short(self.evaluator.graph, min(found, key=lambda answer: answer[0])[1])

    def _least(self, of_repeated: str, missing_bytes: Sequence[int]) -> tuple[float, tuple[str, ...]] | None:
        evaluator = self.evaluator
        base = tuple(of_repeated if i in self._repeated else _NONE for i in range(len(evaluator.graph.units)))
        seconds = sum(self._added(unit, of_repeated) for unit in sorted(self._repeated))
        policies = list(base)
        ranks = evaluator.mesh.pp
        kept = kept_at_once(self.schedule, ranks, evaluator.mesh.microbatches, len(self.stages) // ranks)
        for rank, mine in enumerate(stages_by_rank(self.schedule, ranks, len(self.stages))):
            found = self._of_rank(mine, kept[rank][0], base, self.hbm_bytes[rank] - missing_bytes[rank])
            if found is None:
                return None
            seconds += found[0]
            for group, chosen in found[1]:
                group.assign(policies, chosen)
            if found[0] > self.spare_seconds[rank]:
                return inf, tuple(policies)
        return seconds, tuple(policies)

    def _of_rank(
        self, mine: Sequence[int], in_flight: Sequence[Alive], base: tuple[str, ...], room_bytes: int
    ) -> tuple[float, list[tuple[Blocks, tuple[int, int]]]] | None:
        costs, memory = self.evaluator.costs, self.evaluator.costs.memory
        uniform: Checkpointing = base if self._repeated else _NONE
        priced = [costs.priced(*self.stages[s], self.zero, uniform) for s in mine]
        activations = sum(stage.activation_bytes(alive) for alive, stage in zip(in_flight, priced, strict=True))
        still = memory.together([stage.still for stage in priced], highest(self.zero))

        def needed(working_bytes: int) -> float:
            """What has to be spared for the rank to fit, when its blocks work with so much."""
            working = replace(still, temporary=working_bytes)
            beside = working.total_bytes + overhead_bytes(working, self.evaluator.prices.cluster.gpu).total_bytes
            return activations - (room_bytes - beside) / (1 + FRAGMENTATION_FRACTION)

        if needed(still.temporary) > activations:
            return None  # not even without activations
        if needed(still.temporary) <= 0:
            return 0.0, []
        groups = self._known_groups(mine, in_flight, base)
        works = {still.temporary, *(w for group in groups for w in group.working_bytes.values() if w > still.temporary)}
        best: tuple[float, tuple[tuple[int, int], ...]] | None = None
        for working in sorted(works):
            found = least_seconds(groups, needed(working), working)
            if found is not None and (best is None or found < best):
                best = found
        return None if best is None else (best[0], list(zip(groups, best[1], strict=True)))

    def _known_groups(self, mine: Sequence[int], in_flight: Sequence[Alive], base: tuple[str, ...]) -> list[Blocks]:
        """The blocks of a rank by template, found once for all that is asked of it."""
        key = mine[0], base
        if key not in self._of_rank_groups:
            self._of_rank_groups[key] = self._groups(mine, in_flight, base)
        return self._of_rank_groups[key]

    def _groups(self, mine: Sequence[int], in_flight: Sequence[Alive], base: tuple[str, ...]) -> list[Blocks]:
        """The blocks of a rank by template."""
        of_template: dict[int, list[tuple[int, int, int]]] = {}  # (-microbatches, unit, stage)
        for s, alive in zip(mine, in_flight, strict=True):
            first, last = self.stages[s]
            for unit in range(max(first, 1), last):
                if is_block(self.evaluator.graph, unit) and unit not in self._repeated:
                    of_template.setdefault(self.evaluator.kinds.templates[unit], []).append((-alive.untouched, unit, s))
        groups: list[Blocks] = []
        for blocks in of_template.values():
            blocks.sort()
            units = tuple(unit for _, unit, _ in blocks)
            sizes = self.evaluator.costs.bytes
            groups.append(
                Blocks(
                    units=units,
                    in_flight=tuple(-count for count, _, _ in blocks),
                    seconds={policy: self._added(units[0], policy) for policy in POLICIES},
                    spared_bytes={policy: self._spared(blocks, policy, base) for policy in POLICIES},
                    working_bytes={p: sizes.unit(units[0], recompute=p).working_bytes for p in POLICIES},
                )
            )
        return groups

    def _spared(self, blocks: Sequence[tuple[int, int, int]], policy: str, base: tuple[str, ...]) -> float:
        """Bytes of a microbatch that a block spares, as its stage keeps them: the mean of all such blocks there."""
        if policy == _NONE or policy not in self._allowed:
            return 0.0
        stage = blocks[0][2]
        first, last = self.stages[stage]
        mine = {unit for _, unit, s in blocks if s == stage}
        others = any(is_block(self.evaluator.graph, unit) and unit not in mine for unit in range(max(first, 1), last))
        mixed: Checkpointing = (
            tuple(policy if unit in mine else each for unit, each in enumerate(base)) if others else policy
        )
        uniform: Checkpointing = base if self._repeated else _NONE
        costs = self.evaluator.costs
        return (costs.saved_bytes(first, last, uniform) - costs.saved_bytes(first, last, mixed)) / len(mine)

    def _added(self, unit: int, policy: str) -> float:
        """Seconds that a policy adds to a unit's backward."""
        plain = self.evaluator.unit(unit, recompute=_NONE)
        return self.evaluator.unit(unit, recompute=policy).backward.total - plain.backward.total

    @cached_property
    def _allowed(self) -> tuple[str, ...]:
        return policies_of(self.evaluator.graph)

    @cached_property
    def _repeated(self) -> frozenset[int]:
        """Blocks whose module is called by several units."""
        return frozenset(unit for units in repeated_calls(self.evaluator.graph).values() for unit in units)


def every_mix(graph: ModelGraph, stages: Sequence[tuple[int, int]]) -> Iterator[tuple[str, ...]]:
    """Every choice of policies that are not all alike: by stage and template counts of full and selective blocks, the
    first of a stage full; calls of one module are alike."""
    repeated = sorted(repeated_calls(graph).values())
    inside = {unit for units in repeated for unit in units}
    groups: dict[tuple[int, int], list[int]] = {}
    for s, (first, last) in enumerate(stages):
        for unit in range(max(first, 1), last):
            if is_block(graph, unit) and unit not in inside:
                groups.setdefault((s, graph.units[unit].template), []).append(unit)
    allowed = policies_of(graph)
    choices = [[run for run in _runs(units) if {*run.values()} <= {*allowed}] for units in groups.values()]
    choices += [[dict.fromkeys(units, policy) for policy in allowed] for units in repeated]
    for chosen in product(*choices):
        named = {unit: policy for each in chosen for unit, policy in each.items()}
        policies = in_short(graph, tuple(named.get(unit, _NONE) for unit in range(len(graph.units))))
        if not isinstance(policies, str):
            yield policies


def _runs(units: Sequence[int]) -> Iterator[dict[int, str]]:
    """The first i blocks full, those up to j selective, the rest none."""
    for i in range(len(units) + 1):
        for j in range(i, len(units) + 1):
            yield {
                unit: _FULL if position < i else _SELECTIVE if position < j else _NONE
                for position, unit in enumerate(units)
            }


def repeated_calls(graph: ModelGraph) -> dict[str, list[int]]:
    """Module -> the blocks that are its calls, where there are several."""
    calls: dict[str, list[int]] = {}
    for unit, each in enumerate(graph.units):
        if is_block(graph, unit):
            calls.setdefault(each.fqn, []).append(unit)
    return {fqn: units for fqn, units in calls.items() if len(units) > 1}


__all__ = ["Blocks", "Recomputation", "every_mix", "least_seconds"]
