"""Joint placements of all axes + a policy -> a linear program of the whole step that no plan can beat.

It prices what `Evaluator` prices, in the same units, each term as it is or from below, so that its optimum is a proven
bound on `Evaluated.step_seconds` of every plan with these stages, ZeRO stage, schedule and recomputation. With integral
x it is also where the exact search finds its next plan (`exact.py`).

Sets, x, e as in `placements_ilp.py`; t templates, u units, s stages, v values. Every amount below is linear in x and e
(`step_columns.py`), but for the variables in capitals, which stand for a maximum. F_t, B_t, R_t, K_v, M_t are what
templates take (`step_units.py`), A_s what the parameters of a stage take after its last microbatch
(`step_parameters.py`).

    f_s >= sum_u F_t + communication;  b_s >= sum_u B_t + R_t + communication + accumulation of gradients
    f_s >= host's part of it + an action of the schedule;  b_s likewise                    with a pipeline
    T   >= sum_s m (f_s + b_s) + fill and drain through the stages before its first one    each rank, s of it
    T   >= fill + (m-1) f_s + drain + (m-1) b_s'                       gpipe, each s, s': all forwards come first
    A   >= sum_s prelude + A_s                                                             each rank, s of it
    U   >= parameters of a group;  M >= M_t                                                each group, t of a rank
    sum_s (state_s + in flight_s sum_v K_v) + U + M + overhead <= memory of the device     each rank, s of it

    min T + A   s.t. x a legal placement, every axis of more than one rank splits some operation

Where the backward is split nothing drains: the first rank may end with gradients of weights. Without stages
(`stages=None`) the rows are summed over all stages: the bound holds for every cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import pulp

from ...cost_models.memory import COMPUTE_BYTES, FRAGMENTATION_FRACTION
from ..capture.graph import ModelGraph, Ref, TensorType
from ..checkpointing import Checkpointing
from ..schedules import Schedule, get_schedule, in_flight
from ..sharding.mesh import Mesh
from ..zero import Zero, highest
from .assignment import Choice, Stopped
from .held_parameters import HeldParameter
from .joint import Joint, Run, UnitKind
from .linear import Linear, add, scaled, sum_of
from .prices import edge_of, slowest_of_nodes
from .solver import run_solver
from .stage_memory import StageMemory
from .step_columns import MIB, SCALE
from .step_parameters import StageParameters, StepParameters, padded_of, size_of

_BYTES_OF_ROUNDING = 64.0
_FILLED = 1e-6  # of a device's memory: what a rank has left at most whose memory row holds the answer back


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All that is decided beside the placements. `stages` None: any cut; `zero` None: any ZeRO stage.

    `passes`: of any cut, what a step takes at least, in microbatches that go through the whole model.
    """

    stages: tuple[tuple[int, int], ...] | None
    zero: Zero | None
    schedule: str
    activation_checkpoint: Checkpointing
    replicas: int = 1  # of ZeRO-2 and ZeRO-3 shards
    must_fit: bool = True
    passes: float = 0.0


class StepModel:
    """The program of one policy. `forbid` excludes an assignment that was looked at; `solve` may be called again."""

    def __init__(
        self, joint: Joint, policy: Policy, *, mesh: Mesh, master: ModelGraph, optimizer: str, precision: str
    ) -> None:
        self.policy, self.optimizer, self.precision = policy, optimizer, precision
        self.zero = None if policy.zero is None else highest(policy.zero)
        self.prices = replace(joint.uses.prices, mesh=replace(mesh, replicas=policy.replicas))
        self.mesh, self.cluster = self.prices.mesh, self.prices.cluster
        self.slower = slowest_of_nodes(self.mesh, self.cluster)
        self.space = joint.space
        self.memory = StageMemory(prices=self.prices, optimizer=optimizer, precision=precision)
        units = joint.units(policy.activation_checkpoint)
        self.units = units.terms
        stages = policy.stages or ((0, len(self.space.graph.units)),)
        runs = [units.run(first, last, policy.activation_checkpoint) for first, last in stages]
        self.columns = units.columns.forked()
        self._memory_rows: list[pulp.LpConstraint] = []
        self.parameters = StepParameters(self.columns, master, self.prices, zero=self.zero, optimizer=optimizer)
        self.objective = self._any_cut(runs[0]) if policy.stages is None else self._with_stages(policy.stages, runs)
        self.constant = self.objective.pop(None, 0.0)
        self.columns.lp.setObjective(pulp.LpAffineExpression(list(self.objective.items())))

    def _with_stages(self, stages: Sequence[tuple[int, int]], runs: Sequence[Run]) -> Linear:
        times, ranks = self.mesh.microbatches, self.mesh.pp
        schedule = get_schedule(self.policy.schedule)
        forwards: list[Linear] = []
        backwards: list[Linear] = []
        afters: list[Linear] = []
        held: list[StageParameters] = []
        sends = [self._send(schedule, last, s) for s, (_, last) in enumerate(stages[:-1])]
        for (first, last), run in zip(stages, runs, strict=True):
            parameters = self.parameters.of_stage(first, last)
            accumulation, once = self.parameters.after(parameters)
            hosts = self._host(run, schedule, len(stages))
            both = (run.forward, sum_of([(run.backward, 1.0), (accumulation, 1.0)]))
            if self.cluster.gpu.is_host:  # which has added its own part already
                ahead, back = (sum_of([(part, 1.0), (host, 1.0)]) for part, host in zip(both, hosts, strict=True))
            else:
                ahead, back = (self.columns.largest("H", pair) for pair in zip(both, hosts, strict=True))
            forwards.append(ahead)
            backwards.append(back)
            afters.append(add(once, run.once))
            held.append(parameters)
        paths: list[Linear] = []
        ends: list[Linear] = []
        kept = in_flight(self.policy.schedule, ranks, times, len(stages) // ranks)
        for rank in range(ranks):
            mine = schedule.stages_of(rank, ranks, len(stages))
            self._memory_row([(runs[s], held[s], float(kept[s])) for s in mine], 1)
            path = sum_of([(part[s], times) for s in mine for part in (forwards, backwards)])
            for before in range(mine[0]):
                add(path, forwards[before])
                add(path, sends[before])
                if not schedule.splits_backward:
                    add(path, backwards[before])
                    add(path, sends[before])
            paths.append(path)
            ends.append(sum_of([(afters[s], 1.0) for s in mine]))
        if self.policy.schedule == "gpipe":
            through = sum_of([(part, 1.0) for part in (*forwards, *backwards)])
            for send in sends:
                add(through, send, 2.0)
            for one in forwards:
                for other in backwards:
                    paths.append(sum_of([(through, 1.0), (one, times - 1), (other, times - 1)]))
        total = self.columns.largest("T", paths)
        started = SCALE * self.cluster.gpu.pipeline_step_seconds if len(stages) > 1 else 0.0
        return sum_of([(total, 1.0), (self.columns.largest("A", ends), 1.0), ({None: started}, 1.0)])

    def _host(self, run: Run, schedule: Schedule, num_stages: int) -> tuple[Linear, Linear]:
        """The host's seconds forward and backward of a stage, with what the schedule's actions take."""
        if num_stages == 1:
            return {}, {}  # in the terms of the units already
        action = SCALE * self.cluster.gpu.pipeline_action_seconds
        counts = {} if self.cluster.gpu.is_host else run.counts
        forward = sum_of([(self.units[kind].host_forward, count) for kind, count in counts.items()])
        backward = sum_of([(self.units[kind].host_backward, count) for kind, count in counts.items()])
        add(forward, {None: action})
        add(backward, {None: (2 if schedule.splits_backward else 1) * action})
        return forward, backward

    def _any_cut(self, run: Run) -> Linear:
        pp = self.mesh.pp
        parameters = self.parameters.of_stage(0, len(self.space.graph.units))
        accumulation, once = self.parameters.after(parameters)
        through = sum_of([(run.forward, 1.0), (run.backward, 1.0), (accumulation, 1.0)])
        self._memory_row([(run, parameters, 1.0)], pp)
        # Of a pipeline only the optimizer's share of the fullest stage is certain.
        after = once if pp == 1 else self.parameters.optimizer_share(parameters)
        return sum_of([(through, self.policy.passes), (after, 1.0), (run.once, 1 / pp)])

    def _send(self, schedule: Schedule, boundary: int, stage: int) -> Linear:
        """What a message before unit `boundary` takes, behind a pipeline stage; what is handed on takes nothing."""
        graph = self.space.graph
        edge = edge_of(schedule, stage, self.mesh.pp)
        if edge is None:
            return {}
        crossing = {
            value for unit in graph.units[boundary:] for value in unit.inputs if 0 < value.unit < boundary
        }  # fmt: skip
        if self.prices.stack.pipeline_messages != "whole":
            return {}
        found: Linear = {}
        for value in sorted(crossing, key=lambda value: (value.unit, value.output)):
            t = graph.units[value.unit].template
            ref = graph.templates[t].outputs[value.output]
            kind = graph.type_of(value)

            def seconds(choice: Choice, kind: TensorType = kind, ref: Ref = ref) -> float:
                return SCALE * self.prices.send_seconds(int(self.columns.local_bytes(kind, choice, ref.index)), edge)

            add(found, self.columns.chosen(self.columns.vertex[t, ref.node], seconds))
        return found

    # --- memory ---

    def _memory_row(self, stages: Sequence[tuple[Run, StageParameters, float]], devices: int) -> None:
        """What the stages of a rank (or all of them on `devices` devices) need at least.

        `stages`: their units, parameters, microbatches in flight.
        """
        gpu, mesh, zero = self.cluster.gpu, self.mesh, self.zero
        if zero is None or not self.policy.must_fit:
            return
        held_per_byte = self.memory.held_per_byte(zero)
        is_split = zero >= 2 and mesh.state_ranks > 1
        total: Linear = {}
        moving: Linear = {}
        kinds: set[UnitKind] = set()
        for run, parameters, count_in_flight in stages:
            stored = self.parameters.total(parameters, lambda p: size_of(p) if p.trainable else 0.0, master=True)
            frozen = self.parameters.total(parameters, lambda p: 0.0 if p.trainable else size_of(p), master=True)
            if is_split:
                add(moving, self._gathered(parameters, stored, zero, devices))
            add(total, stored, held_per_byte)
            add(total, frozen)
            for kind, count in run.counts.items():
                add(moving, self.units[kind].kept_bytes, count_in_flight * count)
            kinds |= run.counts.keys()
        if devices == 1:
            temporaries = [
                {self.units[kind].temporary: 1.0} for kind in sorted(kinds) if self.units[kind].temporary is not None
            ]
            add(moving, scaled(self.columns.largest("M", temporaries), MIB))
        add(total, moving, 1 + FRAGMENTATION_FRACTION)
        room = devices * (gpu.hbm_bytes - gpu.overhead_bytes + _BYTES_OF_ROUNDING)
        row = self.columns.row(scaled(total, 1 / gpu.hbm_bytes), pulp.LpConstraintLE, room / gpu.hbm_bytes)
        self._memory_rows += [row] if row is not None else []

    def _gathered(self, parameters: StageParameters, stored: Linear, zero: int, devices: int) -> Linear:
        """What FSDP2 holds whole of a stage: parameters and, while they accumulate, their gradients."""
        mesh, memory = self.mesh, self.memory
        if memory.keeps_parameters or memory.keeps_gradients:

            def whole(held: HeldParameter) -> float:
                gradient = held.trainable and memory.keeps_gradients
                return padded_of(held, mesh.shards) * (memory.keeps_parameters + gradient)

            return self.parameters.total(parameters, whole, master=False)
        if devices > 1:
            return {}
        compute = COMPUTE_BYTES[self.precision] / 4
        sizes = [sum_of([(self.parameters.trained(key), 1 / MIB) for key in members]) for members in parameters.groups]
        unit = scaled(self.columns.largest("U", sizes), MIB)
        gathered = scaled(unit, compute + (1 if compute < 1 else 0))
        return add(gathered, stored if zero == 2 else unit, compute)

    # --- answers ---

    def forbid(self, chosen: Sequence[int]) -> None:
        """Exclude one assignment."""
        row: Linear = {}
        for n, k in enumerate(chosen):
            add(row, {self.columns.x[n, k]: 1.0})
        self.columns.row(row, pulp.LpConstraintLE, len(chosen) - 1.0)

    @property
    def has_room(self) -> bool:
        """Whether no rank's memory is filled by the last answer, so that without limits it would be the same."""
        fullness = [row.value() for row in self._memory_rows]  # without columns' values pulp has none
        return all(each is not None and each < -_FILLED for each in fullness)

    def solve(
        self, *, as_mip: bool, time_limit_seconds: float | None = None, known_seconds: float = inf
    ) -> tuple[float, tuple[int, ...] | None]:
        """(bound in seconds, assignment); without an assignment where it is a relaxation that came out fractional.

        `known_seconds`: of a plan. An integer program is only asked for what is below, and stops early: a value that
        is not below is no more than the answer that there is none.

        Raises:
            NoAssignment: the policy has no plan.
            Stopped: the limits were reached before the best one was known.
        """
        for column in self.columns.x.values():
            if column is not None:
                column.cat = pulp.LpInteger if as_mip else pulp.LpContinuous
        bound = self.constant
        if self.columns.num_columns:
            cutoff = known_seconds * SCALE / self.slower - self.constant
            run_solver(self.columns.lp, as_mip=as_mip, time_limit_seconds=time_limit_seconds, cutoff=cutoff)
            if self.columns.lp.sol_status != pulp.LpSolutionOptimal:
                raise Stopped
            value: Any = pulp.value(self.columns.lp.objective)  # a number once solved; pulp's types allow expressions
            bound += value or 0.0
        chosen: list[int] = []
        for n, ks in enumerate(self.columns.alive):
            values = [1.0 if self.columns.x[n, k] is None else float(self.columns.x[n, k].varValue or 0.0) for k in ks]  # type: ignore[union-attr]
            best = max(range(len(ks)), key=lambda i: values[i])
            if not as_mip and values[best] < 1 - 1e-6:
                return bound / SCALE * self.slower, None
            chosen.append(ks[best])
        return bound / SCALE * self.slower, tuple(chosen)
