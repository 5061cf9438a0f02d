"""Placements on a mesh -> candidates: cut into stages and priced under every policy that may win.

A policy is a ZeRO stage and its groups, activation checkpointing, and a pipeline. Those with the lowest floor come
first (`floors.py`); what surely does not fit or beat the best known is neither cut nor priced. Recomputation only costs
time: where a policy fits, the same with more of it is left out, and where it does not, as few blocks run again as it
takes (`recompute.py`). Where ZeRO-3 fits and ZeRO-2 does not, as many blocks are under ZeRO-2 as fit (`resharding.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from ..checkpointing import Checkpointing
from ..errors import CannotLower
from ..sharding.mesh import Mesh
from ..sharding.program import Placements
from ..zero import FREED, Zero
from .answer import Candidate, Setting, rank
from .cuts import Cuts, Stages
from .evaluate import Evaluator
from .floors import cut_seconds, floor_bytes, spare_seconds
from .pins import written_shares
from .policies import Pipeline, num_cuttable, pipelines_for, shardings_for
from .prices import Prices
from .rank_speeds import Devices
from .recompute import Recomputation
from .resharding import Resharding
from .shared import Shared
from .space import Space
from .split_backward import loses_weights
from .step_model import Policy
from .ways import Way, may_mix, ways_of

_MOST_CORRECTIONS = 4  # of the room for activations, where a rank turns out to need more than said


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Candidates of one mesh and placements; without any that may fit the leanest one alone.

    `is_crowded`: whether a policy that may be faster than all of them does not fit. `may_fit`: whether any may.
    """

    candidates: tuple[Candidate, ...] = ()
    is_crowded: bool = False
    may_fit: bool = True

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The fastest that fits, or the leanest."""
        return best_of(self.candidates)


def best_of(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The fastest that fits, or the leanest; none of none."""
    fitting = [candidate for candidate in candidates if candidate.fits]
    if fitting:
        return (min(fitting, key=lambda candidate: (not candidate.cost.is_simulated, rank(candidate))),)
    return (min(candidates, key=lambda candidate: candidate.cost.memory_bytes),) if candidates else ()


class _Fitted(NamedTuple):
    """The candidate of a way, if one is worth a price. `is_slow`: whatever fits is slower than what is known."""

    candidate: Candidate | None = None
    is_slow: bool = False


@dataclass
class Pricer:
    """Prices of one model on one cluster."""

    setting: Setting
    space: Space
    devices: Devices
    shared: Shared = field(default_factory=Shared)
    _prices: dict[Mesh, Prices] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.cuts = Cuts(num_units=len(self.space.graph.units), devices=self.devices)

    def prices(self, mesh: Mesh) -> Prices:
        if mesh not in self._prices:
            cluster, stack = self.setting.cluster, self.setting.stack
            self._prices[mesh] = Prices(mesh=mesh, cluster=cluster, stack=stack, shared=self.shared)
        return self._prices[mesh]

    def evaluator(self, mesh: Mesh, placements: Placements) -> Evaluator:
        """It finds the shares of the batch itself."""
        mesh = replace(mesh, shares=()) if mesh.shares else mesh
        ratio = self.setting.pins.batch_shares or ()
        dp_ranks = self.devices.of_dp_ranks(mesh) if (self.devices.differ or ratio) and mesh.dp > 1 else ()
        return Evaluator(
            graph=self.space.graph,
            master=self.setting.graph,
            placements=placements,
            prices=self.prices(mesh),
            optimizer=self.setting.optimizer,
            precision=self.setting.precision,
            slowdown=() if (speeds := self.devices.of(mesh)).are_alike else speeds.slowdown,
            dp_ranks=dp_ranks if ratio or len({*dp_ranks}) > 1 else (),
            share_ratio=ratio,
        )

    def why_not(self, mesh: Mesh, placements: Placements) -> str:
        """Why these placements cannot have the shares of the batch that are pinned, "" if they can.

        Raises:
            CannotLower: the placements do not go on this mesh.
        """
        pins = self.setting.pins
        if not pins.is_uneven or not (reason := self.evaluator(mesh, placements).why_even):
            return ""
        return f"batch-shares={written_shares(pins.batch_shares or ())} cannot be: {reason}"

    def _rooms(self, mesh: Mesh) -> tuple[int, ...]:
        """Memory by pipeline rank: of the dp rank with most, for another may take fewer microbatches."""
        if not self.devices.differ:
            return self.devices.of(mesh).hbm_bytes
        return tuple(map(max, zip(*(ranks.hbm_bytes for ranks in self.devices.of_dp_ranks(mesh)), strict=True)))

    def pipelines(self, mesh: Mesh, zero: Zero = 0) -> list[Pipeline]:
        return pipelines_for(mesh, self.setting.pins, num_cuttable(self.space.graph), zero)

    def priced(self, mesh: Mesh, placements: Placements, known_seconds: float = inf) -> Priced:
        """What may beat `known_seconds`.

        Raises:
            CannotLower: the placements do not go on this mesh.
        """
        return self.priced_ways(mesh, tuple(self.ways(mesh, placements, known_seconds)), known_seconds)

    def priced_ways(self, mesh: Mesh, ways: Sequence[Way], known_seconds: float = inf) -> Priced:
        """What of `ways` on a mesh may beat `known_seconds`."""
        room = max(self._rooms(mesh))
        found: list[Candidate] = []
        roomy: set[tuple[object, ...]] = set()
        levels: dict[tuple[object, ...], int] = {}  # from which on arrangements fit as they are
        crowded: list[Way] = []
        best = known_seconds
        for way in sorted(ways, key=lambda way: way.fitting.likely):
            if way.fitting.likely >= best:
                crowded.append(way)
                continue
            mixes = way.fitting.least < way.uniform_seconds and levels.get(way.kept, inf) > way.level
            if way.arrangement in roomy or (way.uniform_seconds >= best and not mixes):
                continue
            may_fit = way.floor_bytes <= room
            if not may_fit and way.checkpoint != "none":
                crowded.append(way)
                continue
            cuts = [
                stages
                for stages in self.cuts.best(*way.policy)
                if cut_seconds(way.evaluator, stages, way.pipeline[0], way.checkpoint) < best
            ]
            if not cuts:
                continue
            candidate, is_slow = self._fitted(way, cuts, best, room)
            if is_slow:
                roomy.add(way.arrangement)
                continue
            if candidate is None or not candidate.fits:
                crowded.append(way)
                found.extend([] if candidate is None else [candidate])
                continue
            roomy.add(way.arrangement)
            if way.checkpoint != "none" or candidate.activation_checkpoint == "none":
                levels[way.arrangement] = min(way.level, levels.get(way.arrangement, way.level))
            if mixes:
                candidate = self._mixed(way.evaluator, candidate, best)
            found.append(candidate)
            best = min(best, candidate.cost.step_seconds) if candidate.cost.is_simulated else best
        if not found and known_seconds == inf:
            # The leanest shows what is missing.
            for way in sorted(crowded, key=lambda way: way.floor_bytes):
                candidate = self.candidate(*way.policy)
                if candidate is not None:
                    found.append(candidate)
                    break
        return Priced(
            candidates=tuple(found),
            is_crowded=any(way.floor_seconds < best for way in crowded),
            may_fit=not ways or any(way.fitting.least < inf for way in ways),
        )

    def ways(self, mesh: Mesh, placements: Placements, known_seconds: float = inf) -> Iterator[Way]:
        """Every policy that may beat `known_seconds`, were there memory enough.

        Raises:
            CannotLower: the placements do not go on this mesh.
        """
        if self.why_not(mesh, placements):
            return
        shardings = shardings_for(self.setting.graph, mesh, self.setting.pins, self.setting.cluster)
        evaluators = {r: self.evaluator(replace(mesh, replicas=r), placements) for _, r in shardings}
        sharded = [(zero, evaluators[replicas]) for zero, replicas in shardings]
        yield from ways_of(self.setting, sharded, self._rooms(mesh), known_seconds)

    def _mixed(self, evaluator: Evaluator, candidate: Candidate, best: float) -> Candidate:
        """With the blocks under ZeRO-2 for which `candidate`, all of it under ZeRO-3, has room."""
        stages, schedule, checkpoint = candidate.stages, candidate.schedule, candidate.activation_checkpoint
        zero = Resharding(evaluator, stages, schedule, checkpoint, candidate.hbm_bytes).fastest()
        if zero is None or zero == FREED:
            return candidate
        return best_of([self._costed(evaluator, stages, schedule, zero, checkpoint, best), candidate])[0]

    def _fitted(self, way: Way, cuts: Sequence[Stages], best: float, room_bytes: int) -> _Fitted:
        """A way with as few blocks run again as fit, if nothing is said about that."""
        if self.setting.pins.activation_checkpoint is not None:
            return _Fitted(self._best_cut(cuts, *way.policy, best) if way.floor_bytes <= room_bytes else None)
        if way.checkpoint == "none":
            if floor_bytes(way.evaluator, way.pipeline, way.zero, "full") > room_bytes:
                return _Fitted()
            hbm_bytes = self.devices.of(way.evaluator.mesh).hbm_bytes
            every = [self._recomputed(way, stages, hbm_bytes, best) for stages in cuts]
            found = [fitted.candidate for fitted in every if fitted.candidate is not None]
            return _Fitted(next(iter(best_of(found)), None), any(fitted.is_slow for fitted in every))
        candidate = self._best_cut(cuts, *way.policy, best)
        if candidate is None or not candidate.fits:
            return _Fitted(candidate)
        less = self._recomputed(way, candidate.stages, candidate.hbm_bytes, best).candidate
        return _Fitted(best_of([candidate, less])[0] if less else candidate)

    def _recomputed(self, way: Way, stages: Stages, hbm_bytes: tuple[int, ...], best: float) -> _Fitted:
        """One cut with as few blocks run again as fit; without a candidate where none does or it is slow."""
        evaluator, schedule, zero = way.evaluator, way.pipeline[0], way.zero
        if loses_weights(evaluator.program, schedule, stages):
            return _Fitted()
        spare = spare_seconds(evaluator, stages, schedule, best)
        recomputation = Recomputation(evaluator, stages, schedule, zero, hbm_bytes, spare)
        missing = [0] * len(hbm_bytes)
        for _ in range(_MOST_CORRECTIONS):
            checkpoint = recomputation.least(missing)
            if checkpoint is None:
                return _Fitted()
            if cut_seconds(evaluator, stages, schedule, checkpoint) >= best:
                return _Fitted(is_slow=True)
            found = self._costed(evaluator, stages, schedule, zero, checkpoint, best)
            if found.fits:
                return _Fitted(found)
            pairs = zip(found.cost.rank_memory, found.hbm_bytes, strict=True)
            short = (memory["total"] - size for memory, size in pairs)
            missing = [before + max(0, more) for before, more in zip(missing, short, strict=True)]
        return _Fitted()

    def candidate(
        self,
        evaluator: Evaluator,
        pipeline: Pipeline,
        zero: Zero,
        checkpoint: Checkpointing,
        known_seconds: float = inf,
    ) -> Candidate | None:
        """One policy under its best cut; None where the schedule would lose gradients."""
        cuts = self.cuts.best(evaluator, pipeline, zero, checkpoint)
        return self._best_cut(cuts, evaluator, pipeline, zero, checkpoint, known_seconds)

    def _best_cut(
        self,
        cuts: Sequence[Stages],
        evaluator: Evaluator,
        pipeline: Pipeline,
        zero: Zero,
        checkpoint: Checkpointing,
        known_seconds: float,
    ) -> Candidate | None:
        found = [
            self._costed(evaluator, stages, pipeline[0], zero, checkpoint, known_seconds)
            for stages in cuts
            if not loses_weights(evaluator.program, pipeline[0], stages)
        ]
        return next(iter(best_of(found)), None)

    def leaf(self, mesh: Mesh, placements: Placements, policy: Policy, known_seconds: float) -> Candidate | None:
        """A policy with its cut, ZeRO-3 or the best mix; None where the conversions of two axes do not go together."""
        try:
            evaluator = self.evaluator(replace(mesh, replicas=policy.replicas), placements)
            assert policy.stages is not None
            assert policy.zero is not None
            if loses_weights(evaluator.program, policy.schedule, policy.stages) or self.why_not(mesh, placements):
                return None
            found = self._costed(
                evaluator, policy.stages, policy.schedule, policy.zero, policy.activation_checkpoint, known_seconds
            )
            is_mixed = policy.zero == FREED and may_mix(self.setting.pins, evaluator)
            return self._mixed(evaluator, found, known_seconds) if is_mixed else found
        except CannotLower:
            return None

    def whole(
        self,
        mesh: Mesh,
        placements: Placements,
        stages: Stages,
        schedule: str,
        zero: Zero,
        checkpoint: Checkpointing,
    ) -> Candidate:
        """A choice of everything, as it is."""
        return self.simulated(self._costed(self.evaluator(mesh, placements), stages, schedule, zero, checkpoint, inf))

    def simulated(self, candidate: Candidate) -> Candidate:
        """With the whole step simulated, though others are faster or it does not fit."""
        if candidate.cost.is_simulated:
            return candidate
        cost = self.evaluator(candidate.mesh, candidate.placements).evaluate(
            candidate.stages,
            schedule=candidate.schedule,
            zero=candidate.zero,
            activation_checkpoint=candidate.activation_checkpoint,
        )
        return replace(candidate, mesh=replace(candidate.mesh, shares=cost.shares), cost=cost)

    def _costed(
        self,
        evaluator: Evaluator,
        stages: Stages,
        schedule: str,
        zero: Zero,
        checkpoint: Checkpointing,
        known_seconds: float,
    ) -> Candidate:
        cost = evaluator.evaluate(
            stages,
            schedule=schedule,
            zero=zero,
            activation_checkpoint=checkpoint,
            known_seconds=known_seconds,
            room_bytes=self.setting.cluster.gpu.hbm_bytes,
        )
        return Candidate(
            mesh=replace(evaluator.mesh, shares=cost.shares) if cost.shares else evaluator.mesh,
            placements=evaluator.placements,
            stages=stages,
            schedule=schedule,
            zero=zero,
            activation_checkpoint=checkpoint,
            cost=cost,
            hbm_bytes=cost.hbm_bytes or self.devices.of(evaluator.mesh).hbm_bytes,
        )
