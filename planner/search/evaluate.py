"""A complete candidate, lowered -> seconds of every stage and of the step, and bytes by component on every rank.

Unlike the integer program this reads the lowered program itself: conversions as they are shared, local types as they
come out, what autograd keeps counted once per tensor, host launches against device time per unit, the schedule
simulated. Stages are priced by `stage_costs.py`; ranks with equal stages are worked out once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from ..capture.graph import ModelGraph
from ..checkpointing import Checkpointing
from ..schedules import Alive, Schedule, get_schedule, kept_at_once, possible_counts, stages_by_rank
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..sharding.program import ModelProgram, Placements
from ..sharding.shares import why_even, why_even_under
from ..zero import FREED, Zero, highest
from .dp_ranks import Course, DpRanks, PipelineRank, with_memory
from .fsdp_collectives import gathers_waited_for
from .least_units import LeastUnits
from .pipeline_buffers import buffered, microbatches_kept
from .pipeline_seconds import action_seconds, pipeline_seconds
from .prices import Prices, edge_of, slowest_of_nodes
from .rank_speeds import RankSpeeds
from .stage_cost import PricedStage, StageCost
from .stage_costs import StageCosts
from .unit_costs import Seconds, UnitCost
from .unit_kinds import UnitKinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a candidate costs. `breakdown` is of the busiest rank and sums to `step_seconds`.

    rank_memory: bytes by component on each pipeline rank, of all its stages together; of dp ranks of different devices
    that of the one with least to spare, which has `hbm_bytes`.
    is_simulated: False where the pipeline was not run through and the step takes longer than said.
    shares: of the batch, as in `Mesh`. `stages` then has the times of the first dp rank, and `paces`, by dp rank and
    pipeline rank, says how much slower than the fastest device each is.
    """

    step_seconds: float
    bubble_fraction: float
    breakdown: Mapping[str, float]
    stages: tuple[StageCost, ...]
    rank_memory: tuple[Mapping[str, int], ...]
    is_simulated: bool = True
    shares: tuple[int, ...] = ()
    paces: tuple[tuple[float, ...], ...] = ()
    hbm_bytes: tuple[int, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return max(memory["total"] for memory in self.rank_memory)


@dataclass(frozen=True, slots=True)
class _Work:
    """What is priced: stages as unit ranges, and how they are run."""

    stages: tuple[tuple[int, int], ...]
    order: Schedule
    zero: Zero
    activation_checkpoint: Checkpointing

    def in_order(self, by_rank: Sequence[Sequence[StageCost]]) -> tuple[StageCost, ...]:
        """Costs by rank in the order of the model."""
        placed = stages_by_rank(self.order.name, len(by_rank), len(self.stages))
        pairs = zip(placed, by_rank, strict=True)
        found = {s: cost for mine, costs in pairs for s, cost in zip(mine, costs, strict=True)}
        return tuple(found[s] for s in range(len(self.stages)))


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
    dp_ranks: tuple[RankSpeeds, ...] = ()  # of each dp rank, where they differ or `share_ratio` is given
    share_ratio: tuple[int, ...] = ()  # of the batch, in any unit: what is pinned

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

    @cached_property
    def least_units(self) -> LeastUnits:
        return LeastUnits(self.costs)

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
        work = _Work(tuple(stages), get_schedule(schedule), zero, activation_checkpoint)
        started = self.prices.cluster.gpu.pipeline_step_seconds if len(stages) > 1 else 0.0
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        together = self._ranks(work, self.slowdown, self.mesh.microbatches)  # at the pace of the slowest
        after = max(rank.after_seconds for rank in together)

        def may_win(seconds: float) -> bool:
            return (started + seconds + after) * slower < known_seconds

        course = self._course(work, together, may_win, room_bytes)
        count = course.microbatches
        step = started + course.seconds + after
        busiest, ending = max(
            zip(course.ranks, together, strict=True),
            key=lambda pair: count * pair[0].busy_seconds + pair[1].after_seconds,
        )
        both = sum((cost.forward + cost.backward for cost in busiest.stages), Seconds())
        once = {name: sum(cost.step[name] for cost in ending.stages) for name in ending.stages[0].step}
        breakdown = {"compute": count * both.compute + once["compute"]}
        for axis in reversed(SPLIT_AXES):
            if axis in self.mesh.written:
                breakdown[axis] = count * both.on_axis(axis) + once[axis]
        breakdown["optimizer"] = once["optimizer"]
        busy = count * both.total
        if len(stages) > 1:
            breakdown["pipeline_host"] = started + max(0.0, count * busiest.acting_seconds - busy)
            breakdown["bubble"] = step - sum(breakdown.values())
        else:
            step = sum(breakdown.values())
        return Evaluated(
            step_seconds=step * slower,
            bubble_fraction=max(0.0, 1 - busy / course.seconds) if len(stages) > 1 and course.seconds else 0.0,
            breakdown={name: seconds * slower for name, seconds in breakdown.items()},
            stages=work.in_order(with_memory(course.shown, course.tight)),
            rank_memory=tuple(rank.memory for rank in course.tight),
            is_simulated=course.is_simulated,
            shares=course.shares,
            paces=tuple(speeds.slowdown for speeds in self.dp_ranks) if course.shares else (),
            hbm_bytes=course.hbm_bytes,
        )

    def _course(
        self,
        work: _Work,
        together: Sequence[PipelineRank],
        may_win: Callable[[float], bool],
        room_bytes: float,
    ) -> Course:
        """The microbatches of a step, simulated where what they surely take may win and fits `room_bytes`.

        `together`: the ranks at the pace of the slowest of each stage.
        """
        count, ranks = self.mesh.microbatches, self.mesh.pp

        def timeline(ranks: Sequence[PipelineRank], count: int) -> float:
            costs, stack = work.in_order([rank.stages for rank in ranks]), self.prices.stack
            return pipeline_seconds(costs, work.order, stack, ranks=self.mesh.pp, microbatches=count)

        per_rank = len(work.stages) // ranks
        if self.dp_ranks and not (why_even_under(highest(work.zero), per_rank) or self.why_even):
            own = DpRanks(
                speeds=self.dp_ranks,
                microbatches=count,
                priced=lambda pace, count: self._ranks(work, pace, count),
                timeline=timeline,
                counts=possible_counts(work.order.name, ranks, per_rank),
                ratio=self.share_ratio,
            )
            return own.course(may_win)
        seconds = max(count * rank.acting_seconds for rank in together)  # each rank is busy with all of its actions
        is_simulated = may_win(seconds) and max(rank.memory["total"] for rank in together) <= room_bytes
        return Course(
            ranks=together,
            microbatches=count,
            seconds=timeline(together, count) if is_simulated else seconds,
            shown=together,
            tight=together,
            is_simulated=is_simulated,
        )

    @cached_property
    def why_even(self) -> str:
        """Why the placements let no dp rank take more microbatches than another; "" where they do."""
        return why_even(self.program)

    def rank(
        self,
        rank: int,
        stages: Sequence[tuple[int, int]],
        *,
        schedule: str,
        zero: Zero,
        activation_checkpoint: Checkpointing,
    ) -> PipelineRank:
        """One pipeline rank at the pace of the slowest."""
        work = _Work(tuple(stages), get_schedule(schedule), zero, activation_checkpoint)
        return self._ranks(work, self.slowdown, self.mesh.microbatches, range(rank, rank + 1))[0]

    def _ranks(
        self, work: _Work, pace: tuple[float, ...], microbatches: int, wanted: range | None = None
    ) -> list[PipelineRank]:
        """The ranks of a pipeline, all if not said; those with equal stages and messages are one object. `pace`: as
        `slowdown`."""
        num_ranks, stages, order, zero = self.mesh.pp, work.stages, work.order, work.zero
        shape = order.name, num_ranks, microbatches, len(stages) // num_ranks
        kept, placed = kept_at_once(*shape), stages_by_rank(order.name, num_ranks, len(stages))
        waits = highest(zero) == FREED and self.mesh.state_ranks > 1
        stack = self.prices.stack
        known: dict[object, PipelineRank] = {}
        found: list[PipelineRank] = []
        for rank in range(num_ranks) if wanted is None else wanted:
            mine = placed[rank]
            slowdown = pace[rank] if pace else 1.0
            of_stage: list[tuple[PricedStage, float, bool]] = []
            for s in mine:
                waited = gathers_waited_for(*shape, s) if waits else 0
                priced = self.costs.priced(*stages[s], zero, work.activation_checkpoint, waited)
                priced = buffered(priced, s, self.program, stack, len(stages))
                of_stage.append((priced, self.send_seconds(order, s, stages), s == 0))
            counts = microbatches_kept(kept[rank], mine, stack, len(stages))
            key = (*of_stage, slowdown, counts)
            if key not in known:
                is_pipeline = len(stages) > 1
                known[key] = self._rank(of_stage, slowdown, counts, order, highest(zero), is_pipeline=is_pipeline)
            found.append(known[key])
        return found

    def _rank(
        self,
        of_stage: Sequence[tuple[PricedStage, float, bool]],
        slowdown: float,
        kept: Sequence[Sequence[Alive]],
        order: Schedule,
        zero: int,
        *,
        is_pipeline: bool,
    ) -> PipelineRank:
        memory, gpu = self.costs.memory, self.prices.cluster.gpu
        priced = [stage for stage, _, _ in of_stage]

        def saved(counts: Sequence[Alive]) -> int:
            return sum(stage.activation_bytes(alive) for alive, stage in zip(counts, priced, strict=True))

        counts = max(kept, key=saved)
        parts = [
            memory.with_saved(stage.still, stage.activation_bytes(alive))
            for alive, stage in zip(counts, priced, strict=True)
        ]
        together = memory.of_rank(parts, zero)
        costs: list[StageCost] = []
        for (stage, send_seconds, is_first), part in zip(of_stage, parts, strict=True):
            cost = stage.cost if slowdown == 1.0 else stage.cost.slowed(slowdown)
            costs.append(
                replace(
                    cost,
                    memory_bytes=together if len(parts) == 1 else part.by_component(),
                    send_seconds=send_seconds,
                    action_seconds=action_seconds(cost, order, gpu, is_first=is_first, is_pipeline=is_pipeline),
                )
            )
        return PipelineRank(
            stages=tuple(costs),
            memory=together,
            busy_seconds=sum(cost.busy_seconds for cost in costs),
            acting_seconds=sum(sum(cost.action_seconds.values()) for cost in costs),
            after_seconds=sum(cost.step_seconds for cost in costs),
        )

    def send_seconds(self, order: Schedule, stage: int, stages: Sequence[tuple[int, int]]) -> float:
        """To the next stage; neighbours on one rank hand on."""
        edge = edge_of(order, stage, self.mesh.pp) if stage + 1 < len(stages) else None
        return 0.0 if edge is None else self.costs.send_seconds(stages[stage][1], edge)
