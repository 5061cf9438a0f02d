"""A policy for given placements -> the cuts into stages that are worth a price."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..checkpointing import Checkpointing
from ..schedules import alive_at_most, get_schedule
from ..zero import Zero
from .assignment import NoAssignment
from .cutting import Cutting
from .evaluate import Evaluator
from .policies import Pipeline
from .rank_speeds import Devices
from .stages_ilp import best_cut

Stages = tuple[tuple[int, int], ...]
_CUT_SECONDS = 20.0  # that the solver may take for one cut


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Cuts of a model of `num_units` units. `devices` are those with most memory, as prices have them."""

    num_units: int
    devices: Devices

    def best(
        self, evaluator: Evaluator, pipeline: Pipeline, zero: Zero, checkpoint: Checkpointing
    ) -> tuple[Stages, ...]:
        """The best cut where the ranks of a stage go at the pace of the slowest of them; and where dp ranks may make up
        for it by their shares of the batch, the best at the pace that they have together."""
        mesh, slowest = evaluator.mesh, self.devices.of(evaluator.mesh).slowdown
        if mesh.pp == 1:
            return (((0, self.num_units),),)
        found = [self._cut(evaluator, pipeline, zero, checkpoint, slowest)]
        if evaluator.dp_ranks and not evaluator.why_even:
            of_stage = zip(*(ranks.slowdown for ranks in evaluator.dp_ranks), strict=True)
            together = tuple(mesh.dp / sum(1 / pace for pace in paces) for paces in of_stage)
            found.append(self._cut(evaluator, pipeline, zero, checkpoint, together))
        return tuple(dict.fromkeys(found))

    def _cut(
        self,
        evaluator: Evaluator,
        pipeline: Pipeline,
        zero: Zero,
        checkpoint: Checkpointing,
        slowdown: tuple[float, ...],
    ) -> Stages:
        mesh, (schedule, per_rank) = evaluator.mesh, pipeline
        last = self.num_units
        sizes = evaluator.costs.unit_sizes(checkpoint)
        gpu, speeds = self.devices.cluster.gpu, self.devices.of(mesh)
        alive = alive_at_most(schedule, mesh.pp, mesh.microbatches, per_rank)
        rank_of = tuple(get_schedule(schedule).rank_of(s, mesh.pp) for s in range(mesh.pp * per_rank))
        cutting = Cutting(
            seconds=evaluator.costs.unit_seconds(checkpoint).through,
            held_bytes=evaluator.costs.states(zero),
            kept_bytes=sizes.kept,
            cut_seconds=evaluator.costs.cut_seconds,
            in_flight=tuple(each.total for each in alive),
            halfway=tuple(each.halfway for each in alive),
            remade_bytes=sizes.remade,
            rank_of=rank_of,
            microbatches=mesh.microbatches,
            room_bytes=float(gpu.hbm_bytes - gpu.overhead_bytes - sizes.working_bytes),
            pace=() if speeds.are_alike else tuple(slowdown[rank] for rank in rank_of),
            short_bytes=() if speeds.are_alike else tuple(float(gpu.hbm_bytes - size) for size in speeds.hbm_bytes),
        )
        try:
            ends = best_cut(cutting, time_limit_seconds=_CUT_SECONDS)
        except NoAssignment:
            # Nothing fits: the most even cut shows by how much.
            ends = best_cut(replace(cutting, room_bytes=1e18), time_limit_seconds=_CUT_SECONDS)
        bounds = (0, *(end + 1 for end in ends), last)
        return tuple(zip(bounds, bounds[1:], strict=False))
