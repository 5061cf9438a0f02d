"""A complete candidate, lowered -> seconds of every stage and of the step, and bytes by component on every rank.

Unlike the integer program this reads the lowered program itself: conversions as they are shared, local types as they
come out, what autograd keeps counted once per tensor, host launches against device time per unit, the schedule
simulated. Stages are priced by `stage_costs.py`; ranks with equal stages are worked out once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ...cost_models.timeline import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, schedule_seconds
from ..capture.graph import ModelGraph
from ..checkpointing import Checkpointing
from ..schedules import Schedule, action_table, get_schedule, kept_at_once, stages_by_rank
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..sharding.program import ModelProgram, Placements
from ..zero import Zero, highest
from .pipeline_buffers import buffered, microbatches_kept
from .prices import Prices, edge_of, slowest_of_nodes
from .stage_costs import PricedStage, StageCost, StageCosts
from .unit_costs import Seconds, UnitCost
from .unit_kinds import UnitKinds

# A pipeline repeats itself after so many microbatches per rank, with a period of at most so many more. Within 2e-4 of
# the whole simulation on random durations.
_SETTLED_ROUNDS, _REPEATED_ROUNDS = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a candidate costs. `breakdown` is of the busiest rank and sums to `step_seconds`.

    rank_memory: bytes by component on each pipeline rank, of all its stages together.
    is_simulated: False where the pipeline was not run through and the step takes longer than said.
    """

    step_seconds: float
    bubble_fraction: float
    breakdown: Mapping[str, float]
    stages: tuple[StageCost, ...]
    rank_memory: tuple[Mapping[str, int], ...]
    is_simulated: bool = True

    @property
    def memory_bytes(self) -> int:
        return max(memory["total"] for memory in self.rank_memory)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """The stages of one pipeline rank. `acting_seconds`: of one microbatch, with what the schedule takes of the host;
    `after_seconds`: once a step."""

    stages: tuple[StageCost, ...]
    memory: Mapping[str, int]
    busy_seconds: float
    acting_seconds: float
    after_seconds: float


@dataclass(frozen=True)
class Evaluator:
    """Costs of one placement on one mesh; stages and policies vary.

    `graph` has the dtypes that run, `master` those that are stored.
    """

    graph: ModelGraph
    master: ModelGraph
    placements: Placements
    prices: Prices
    optimizer: str
    precision: str = "fp32"
    slowdown: tuple[float, ...] = ()  # by pipeline rank, over the device that `prices` are of; empty where all are 1

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    @cached_property
    def kinds(self) -> UnitKinds:
        return self.prices.shared.kinds(self.graph)

    @cached_property
    def program(self) -> ModelProgram:
        return self.prices.shared.program(self.graph, self.placements, self.mesh)

    @cached_property
    def costs(self) -> StageCosts:
        return StageCosts(
            program=self.program,
            master=self.master,
            prices=self.prices,
            kinds=self.kinds,
            keys=self.prices.shared.keys(self.graph, self.placements, self.mesh),
            optimizer=self.optimizer,
            precision=self.precision,
        )

    def unit(self, index: int, *, recompute: Checkpointing) -> UnitCost:
        """`recompute`: one of RECOMPUTE for all blocks, or for each unit."""
        return self.costs.units.unit(index, recompute=recompute)

    def least_seconds(self, recompute: Checkpointing = "none") -> float:
        """No cut or schedule of these placements gives a faster step: all ranks busy with the units alone."""
        if isinstance(recompute, str):
            counted = ((self.unit(index, recompute=recompute), count) for index, count in self.kinds.counts)
        else:
            counted = self.costs.units.counted(range(1, len(self.graph.units)), recompute=recompute)
        through = sum(count * (cost.forward.total + cost.backward.total) for cost, count in counted)
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        return through * self.mesh.microbatches / self.mesh.pp * slower

    # --- the step ---

    def evaluate(
        self,
        stages: Sequence[tuple[int, int]],
        *,
        schedule: str,
        zero: Zero,
        activation_checkpoint: Checkpointing,
        known_seconds: float = inf,
        room_bytes: float = inf,
    ) -> Evaluated:
        """Price a complete candidate; `stages`, a multiple of pp, lie on ranks as the schedule places them.

        The schedule is not simulated where the step surely takes `known_seconds` or more than `room_bytes` are needed.
        """
        microbatches, ranks = self.mesh.microbatches, self.mesh.pp
        order = get_schedule(schedule)
        of_rank = stages_by_rank(schedule, ranks, len(stages))
        by_rank = self.ranks(stages, order, zero, activation_checkpoint)
        after = max(rank.after_seconds for rank in by_rank)
        started = self.prices.cluster.gpu.pipeline_step_seconds if len(stages) > 1 else 0.0
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        # Each rank is busy with all of its actions.
        timeline = max(microbatches * rank.acting_seconds for rank in by_rank)
        is_fast = (started + timeline + after) * slower < known_seconds
        is_simulated = is_fast and max(rank.memory["total"] for rank in by_rank) <= room_bytes
        placed = {
            s: cost
            for rank, mine in zip(by_rank, of_rank, strict=True)
            for s, cost in zip(mine, rank.stages, strict=True)
        }
        costs = tuple(placed[s] for s in range(len(stages)))
        if is_simulated:
            timeline = self._timeline_seconds(costs, order)
        step = started + timeline + after
        busiest = max(by_rank, key=lambda rank: microbatches * rank.busy_seconds + rank.after_seconds)
        both = sum((cost.forward + cost.backward for cost in busiest.stages), Seconds())
        once = {name: sum(cost.step[name] for cost in busiest.stages) for name in busiest.stages[0].step}
        breakdown = {"compute": microbatches * both.compute + once["compute"]}
        for axis in reversed(SPLIT_AXES):
            if axis in self.mesh.written:
                breakdown[axis] = microbatches * both.on_axis(axis) + once[axis]
        breakdown["optimizer"] = once["optimizer"]
        busy = microbatches * both.total
        if len(stages) > 1:
            breakdown["pipeline_host"] = started + max(0.0, microbatches * busiest.acting_seconds - busy)
            breakdown["bubble"] = step - sum(breakdown.values())
        else:
            step = sum(breakdown.values())
        return Evaluated(
            step_seconds=step * slower,
            bubble_fraction=max(0.0, 1 - busy / timeline) if len(stages) > 1 and timeline else 0.0,
            breakdown={name: seconds * slower for name, seconds in breakdown.items()},
            stages=costs,
            rank_memory=tuple(rank.memory for rank in by_rank),
            is_simulated=is_simulated,
        )

    def ranks(
        self, stages: Sequence[tuple[int, int]], order: Schedule, zero: Zero, activation_checkpoint: Checkpointing
    ) -> list[Rank]:
        """Every pipeline rank; those with equal stages and messages are one object."""
        ranks, microbatches = self.mesh.pp, self.mesh.microbatches
        priced = [self.costs.priced(first, last, zero, activation_checkpoint) for first, last in stages]
        sends = [self._stage_send_seconds(order, s, stages) for s in range(len(stages))]
        kept = kept_at_once(order.name, ranks, microbatches, len(stages) // ranks)
        known: dict[object, Rank] = {}
        found: list[Rank] = []
        stack = self.prices.stack
        priced = [buffered(stage, s, self.program, stack, len(stages)) for s, stage in enumerate(priced)]
        for rank, mine in enumerate(stages_by_rank(order.name, ranks, len(stages))):
            slowdown = self.slowdown[rank] if self.slowdown else 1.0
            of_stage = tuple((priced[s], sends[s], s == 0) for s in mine)
            counts = microbatches_kept(kept[rank], mine, stack, len(stages))
            key = (of_stage, slowdown, counts)
            if key not in known:
                known[key] = self._rank(of_stage, slowdown, counts, order, highest(zero), is_pipeline=len(stages) > 1)
            found.append(known[key])
        return found

    def _rank(
        self,
        of_stage: tuple[tuple[PricedStage, float, bool], ...],
        slowdown: float,
        kept: Sequence[Sequence[int]],
        order: Schedule,
        zero: int,
        *,
        is_pipeline: bool,
    ) -> Rank:
        memory = self.costs.memory
        priced = [stage for stage, _, _ in of_stage]

        def saved(counts: Sequence[int]) -> int:
            return sum(n * stage.saved_bytes for n, stage in zip(counts, priced, strict=True))

        counts = max(kept, key=saved)
        parts = [memory.with_saved(stage.still, stage.saved_bytes, n) for n, stage in zip(counts, priced, strict=True)]
        together = memory.of_rank(parts, zero)
        costs: list[StageCost] = []
        for (stage, send_seconds, is_first), part in zip(of_stage, parts, strict=True):
            cost = stage.cost if slowdown == 1.0 else stage.cost.slowed(slowdown)
            costs.append(
                replace(
                    cost,
                    memory_bytes=together if len(parts) == 1 else part.by_component(),
                    send_seconds=send_seconds,
                    action_seconds=self._action_seconds(cost, order, is_first=is_first, is_pipeline=is_pipeline),
                )
            )
        return Rank(
            stages=tuple(costs),
            memory=together,
            busy_seconds=sum(cost.busy_seconds for cost in costs),
            acting_seconds=sum(sum(cost.action_seconds.values()) for cost in costs),
            after_seconds=sum(cost.step_seconds for cost in costs),
        )

    def _stage_send_seconds(self, order: Schedule, stage: int, stages: Sequence[tuple[int, int]]) -> float:
        """To the next stage; neighbours on one rank hand on."""
        edge = edge_of(order, stage, self.mesh.pp) if stage + 1 < len(stages) else None
        return 0.0 if edge is None else self.costs.send_seconds(stages[stage][1], edge)

    def _action_seconds(
        self, cost: StageCost, order: Schedule, *, is_first: bool, is_pipeline: bool
    ) -> dict[str, float]:
        """Each action of a microbatch, by kind: the device's, or the host's with what the schedule takes of it."""
        gpu = self.prices.cluster.gpu
        action = gpu.pipeline_action_seconds if is_pipeline else 0.0

        def longer(device: float, host: float) -> float:
            return device + action if gpu.is_host else max(device, host + action)

        whole, host = cost.backward.total, cost.host_backward
        ahead = longer(cost.forward.total, cost.host_forward)
        if not order.splits_backward:
            return {FORWARD: ahead, BACKWARD: longer(whole, host)}
        # PyTorch leaves the first stage's whole backward to W: it has no input whose gradient anyone waits for.
        weights = whole if is_first else cost.weights.total
        share = weights / whole if whole else 1.0
        return {
            FORWARD: ahead,
            INPUT_GRADIENT: longer(whole - weights, host * (1 - share)),
            WEIGHT_GRADIENT: longer(weights, host * share),
        }

    def _timeline_seconds(self, costs: Sequence[StageCost], order: Schedule) -> float:
        ranks = self.mesh.pp
        durations = {
            (s, kind): seconds for s, cost in enumerate(costs) for kind, seconds in cost.action_seconds.items()
        }
        sends = [cost.send_seconds for cost in costs[:-1]]
        if len(costs) > ranks and self.prices.stack.interleaved_messages == "waited for":
            # They are sent and received in one call that both sides wait for.
            backward = INPUT_GRADIENT if order.splits_backward else BACKWARD
            for s, seconds in enumerate(sends):
                durations[s, FORWARD] += seconds
                durations[s + 1, backward] += seconds
            sends = [0.0] * len(sends)
        return _simulated(order.name, ranks, self.mesh.microbatches, durations, sends)


def _simulated(
    schedule: str, ranks: int, microbatches: int, durations: Mapping[tuple[int, str], float], sends: Sequence[float]
) -> float:
    """Seconds of a schedule. Far beyond warm-up every further microbatch takes as long as the one before."""
    per_rank = (len(sends) + 1) // ranks
    settled, repeated = _SETTLED_ROUNDS * ranks, _REPEATED_ROUNDS * ranks

    def seconds(count: int) -> float:
        return schedule_seconds(action_table(schedule, ranks, count, per_rank), durations, sends)

    if ranks == 1 or microbatches <= settled + repeated:
        return seconds(microbatches)
    before = seconds(settled)
    return before + (microbatches - settled) * (seconds(settled + repeated) - before) / repeated
