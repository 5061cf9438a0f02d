"""A complete candidate, lowered -> seconds of every unit, stage and step, and bytes by component on every stage.

Unlike the integer program this reads the lowered program itself: conversions as they are shared, local types as they
come out, what autograd keeps counted once per tensor, host launches against device time per unit, the schedule
simulated. Units are priced by `unit_costs.py`, what parameters take by `parameter_seconds.py`, memory by
`stage_memory.py`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from ...cost_models.memory import Memory
from ...cost_models.timeline import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, schedule_seconds
from ..capture.graph import ModelGraph, Value
from ..schedules import Schedule, action_table, get_schedule, kept_at_once
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..sharding.placement import local_type
from ..sharding.program import ModelProgram, Placements
from .held_parameters import HeldParameter, held_parameters
from .parameter_seconds import ParameterSeconds, num_elements
from .prices import Prices, edge_of, slowest_of_nodes
from .shared import DATA_AXES, Once
from .stage_memory import StageMemory
from .step_collectives import REDUCED_AXES, prepared_changes, stage_values
from .unit_costs import VARIES_BY_UNIT, Seconds, UnitCost, UnitCosts

# A pipeline repeats itself after so many microbatches per rank, with a period of at most so many more. Within 2e-4 of
# the whole simulation on random durations.
_SETTLED_ROUNDS, _REPEATED_ROUNDS = 8, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage: a microbatch, and what runs once a step.

    `weights`: the part of `backward` that only weights need. `host_forward`, `host_backward`: the host's part of both,
    without what the schedule takes.
    """

    forward: Seconds
    backward: Seconds
    weights: Seconds
    step: Mapping[str, float]  # once a step: compute of the prelude, each axis, optimizer
    send_seconds: float  # to the next stage, one microbatch
    memory_bytes: Mapping[str, int]
    num_parameters: int
    host_forward: float
    host_backward: float
    action_seconds: Mapping[str, float] = field(default_factory=dict)  # by kind, as simulated

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    def slowed(self, factor: float) -> StageCost:
        """The same on ranks that take `factor` times as long."""
        return replace(
            self,
            forward=self.forward * factor,
            backward=self.backward * factor,
            weights=self.weights * factor,
            step={name: seconds * factor for name, seconds in self.step.items()},
            host_forward=self.host_forward * factor,
            host_backward=self.host_backward * factor,
        )

    @property
    def busy_seconds(self) -> float:
        """Of one microbatch."""
        return self.forward.total + self.backward.total


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
    _stages: dict[tuple[object, ...], tuple[StageCost, Memory, int]] = field(default_factory=dict, init=False)
    _states: dict[tuple[int, int], int] = field(default_factory=dict, init=False)
    _sends: dict[tuple[object, ...], float] = field(default_factory=dict, init=False)

    @cached_property
    def _units(self) -> UnitCosts:
        keys = self.prices.shared.keys(self.graph, self.placements, self.mesh)
        return UnitCosts(program=self.program, prices=self.prices, keys=keys)

    @cached_property
    def _parameters(self) -> ParameterSeconds:
        return ParameterSeconds(prices=self.prices, optimizer=self.optimizer)

    @cached_property
    def _stage_memory(self) -> StageMemory:
        return StageMemory(prices=self.prices, optimizer=self.optimizer, precision=self.precision)

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    @cached_property
    def program(self) -> ModelProgram:
        return self.prices.shared.program(self.graph, self.placements, self.mesh)

    @cached_property
    def master_program(self) -> ModelProgram:
        """The same program over the stored dtypes: read for parameters only, so nothing is lowered again."""
        pairs = zip(self.program.templates, self.master.templates, strict=True)
        templates = tuple(replace(lowered, template=template) for lowered, template in pairs)
        return replace(self.program, graph=self.master, templates=templates)

    @cached_property
    def _sharing(self) -> frozenset[int]:
        """Units that hold a tensor which another unit holds too."""
        known, key = self.prices.shared.costs, ("sharing", id(self.graph))
        if key not in known:
            holders: dict[str, set[int]] = {}
            for index, unit in enumerate(self.graph.units):
                for _, fqn in unit.tensors:
                    holders.setdefault(fqn, set()).add(index)
            known[key] = frozenset(index for units in holders.values() if len(units) > 1 for index in units)
        return known[key]

    @cached_property
    def _layouts(self) -> Hashable:
        """How every template holds its tensors; dp does not show in their shapes."""
        axes = tuple(axis for axis in self.mesh.axes if axis.name not in DATA_AXES)
        return Once((axes, tuple(lowered.tensors for lowered in self.program.templates)))

    def _held(self, first: int, last: int, *, stored: bool = False) -> tuple[HeldParameter, ...]:
        """The parameters of a stage in the dtypes that run, or in those that are stored."""
        program = self.master_program if stored else self.program
        known, key = self.prices.shared.costs, ("held", id(program.graph), self._layouts, first, last)
        if key not in known:
            known[key] = held_parameters(program, first, last)
        return known[key]

    def unit(self, index: int, *, recompute: bool | str) -> UnitCost:
        """`recompute`: False or True for "none" and "full", or one of RECOMPUTE."""
        return self._units.unit(index, recompute=recompute)

    def unit_state_bytes(self, index: int, zero: int) -> int:
        """Parameters, gradients and optimizer state of one unit, for the cut."""
        alike = index if index in self._sharing else -1 - self.graph.units[index].template
        if (alike, zero) not in self._states:
            self._states[alike, zero] = self._unit_state_bytes(index, zero)
        return self._states[alike, zero]

    def _unit_state_bytes(self, index: int, zero: int) -> int:
        stored = self._held(index, index + 1, stored=True)
        held = self._held(index, index + 1)
        parts = self._stage_memory.with_activations(
            self._stage_memory.without_activations((), held, stored, zero), 0, 1
        )
        return parts["total"] - parts["overhead"]

    def stage(self, first: int, last: int, *, in_flight: float, zero: int, recompute: bool | str) -> StageCost:
        """Price units [first, last) as the only stage of a rank, that keeps `in_flight` microbatches."""
        cost, still, saved = self._priced_stage(first, last, zero, recompute)
        return replace(cost, memory_bytes=self._stage_memory.with_activations(still, saved, in_flight))

    def _priced_stage(self, first: int, last: int, zero: int, recompute: bool | str) -> tuple[StageCost, Memory, int]:
        """A stage without memory, its memory without activations, and what one microbatch saves; cached."""
        key = (*self._kind_of_stage(first, last, recompute), zero, recompute)
        if key not in self._stages:
            self._stages[key] = self._stage(first, last, zero, recompute)
        return self._stages[key]

    def _kind_of_stage(self, first: int, last: int, recompute: bool | str) -> tuple[object, ...]:
        """Equal for stages that cost the same: the same templates in the same order, and the same shared tensors."""
        if recompute in VARIES_BY_UNIT:
            return first, last
        shared = tuple(index for index in self._sharing if first <= index < last)
        return first <= 1, shared, tuple(unit.template for unit in self.graph.units[max(first, 1) : last])

    def _stage(self, first: int, last: int, zero: int, recompute: bool | str) -> tuple[StageCost, Memory, int]:
        """Cost without memory, memory without activations, and what one microbatch saves."""
        units = [self.unit(index, recompute=recompute) for index in range(max(first, 1), last)]
        forward, backward, weights = Seconds(), Seconds(), Seconds()
        for unit in units:
            forward, backward, weights = forward + unit.forward, backward + unit.backward, weights + unit.weights
        held = self._held(first, last)
        stored = self._held(first, last, stored=True)
        prelude = self._units.template(self.graph.units[0].template, recompute=False).forward
        prelude += self._units.changes_seconds(prepared_changes(self.program, first, last))[0]
        copied_ahead, copied_back = self._parameters.fsdp_copies(held, zero)
        forward += Seconds(compute=copied_ahead)
        accumulated = Seconds(compute=self._parameters.accumulation(held, zero) + copied_back)
        backward, weights = backward + accumulated, weights + accumulated
        step = {
            "compute": prelude.compute + self.prices.cluster.gpu.host.step_seconds,
            "dp": prelude.dp + self._parameters.data_parallel(held, zero, forward.compute, backward.compute),
            "optimizer": self._parameters.optimizer_step(stored, zero),
        }
        for axis in REDUCED_AXES:
            step[axis] = prelude.on_axis(axis) + self._parameters.partial_gradients(axis, held, zero)
        cost = StageCost(
            forward=forward,
            backward=backward,
            weights=weights,
            step=step,
            send_seconds=0.0,
            memory_bytes={},
            num_parameters=sum(num_elements(parameter) for parameter in stored),
            host_forward=sum(unit.host_forward for unit in units),
            host_backward=sum(unit.host_backward for unit in units),
        )
        return (
            cost,
            self._stage_memory.without_activations(units, held, stored, zero),
            self._units.stage_saved_bytes(first, last, recompute=recompute),
        )

    def send_seconds(self, boundary: int, edge: int) -> float:
        """Messages of one microbatch before unit `boundary`, from pipeline stage `edge` to the next."""
        if boundary >= len(self.graph.units):
            return 0.0
        units = self.graph.units
        made = tuple((units[value.unit].template, value.output) for value in self._crossing[boundary])
        if (made, edge) not in self._sends:
            self._sends[made, edge] = sum(self._sent(template, output, edge) for template, output in made)
        return self._sends[made, edge]

    @property
    def _crossing(self) -> Sequence[tuple[Value, ...]]:
        """The values on the edge before each unit."""
        known, key = self.prices.shared.costs, ("crossing", id(self.graph))
        if key not in known:
            known[key] = tuple(stage_values(self.program, boundary) for boundary in range(len(self.graph.units)))
        return known[key]

    def _sent(self, template: int, output: int, edge: int) -> float:
        lowered = self.program.templates[template]
        kind = lowered.template.type_of(lowered.template.outputs[output])
        size = local_type(kind, lowered.outputs[output].layout, self.mesh.axes).num_bytes
        if self.prices.stack.pipeline_messages == "scattered":
            gathered = self.prices.use_seconds("tp", "all_gather", size)
            return self.prices.send_seconds(size // self.mesh.tp, edge) + gathered
        return self.prices.send_seconds(size, edge)

    def least_seconds(self, recompute: bool | str = "none") -> float:
        """No cut or schedule of these placements gives a faster step: all ranks busy with the units alone."""
        kinds = self._unit_kinds
        through = sum(
            count * (cost.forward.total + cost.backward.total)
            for index, count in kinds
            for cost in (self.unit(index, recompute=recompute),)
        )
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        return through * self.mesh.microbatches / self.mesh.pp * slower

    @property
    def _unit_kinds(self) -> Sequence[tuple[int, int]]:
        """(one of the units that cost the same, how many)."""
        known, key = self.prices.shared.costs, ("kinds", id(self.graph))
        if key not in known:
            units = self.graph.units
            alike: dict[tuple[object, ...], list[int]] = {}
            for index, unit in enumerate(units[1:], start=1):
                sources = tuple((units[value.unit].template, value.output) for value in unit.inputs)
                alike.setdefault((unit.template, sources), []).append(index)
            known[key] = tuple((indices[0], len(indices)) for indices in alike.values())
        return known[key]

    # --- the step ---

    def evaluate(
        self,
        stages: Sequence[tuple[int, int]],
        *,
        schedule: str,
        zero: int,
        activation_checkpoint: str,
        known_seconds: float = inf,
        room_bytes: float = inf,
    ) -> Evaluated:
        """Price a complete candidate; `stages`, a multiple of pp, lie on ranks as the schedule places them.

        The schedule is not simulated where the step surely takes `known_seconds` or more than `room_bytes` are needed.
        """
        microbatches, ranks = self.mesh.microbatches, self.mesh.pp
        order = get_schedule(schedule)
        priced = [self._priced_stage(first, last, zero, activation_checkpoint) for first, last in stages]
        of_rank = [order.stages_of(rank, ranks, len(stages)) for rank in range(ranks)]
        kept = kept_at_once(schedule, ranks, microbatches, len(stages) // ranks)
        memory: dict[int, Mapping[str, int]] = {}
        rank_memory: list[Mapping[str, int]] = []
        for mine, fullest in zip(of_rank, kept, strict=True):
            counts = max(fullest, key=lambda counts: sum(n * priced[s][2] for n, s in zip(counts, mine, strict=True)))
            parts = [
                self._stage_memory.with_saved(priced[s][1], priced[s][2], n) for n, s in zip(counts, mine, strict=True)
            ]
            together = self._stage_memory.of_rank(parts, zero)
            rank_memory.append(together)
            memory |= {s: part.by_component() for s, part in zip(mine, parts, strict=True)}
            if len(mine) == 1:
                memory[mine[0]] = together
        costs = tuple(
            replace(
                cost,
                memory_bytes=memory[s],
                send_seconds=self._stage_send_seconds(order, s, stages),
            )
            for s, cost in enumerate(self._paced([cost for cost, _, _ in priced], of_rank))
        )
        durations = self._durations(costs, order)
        costs = tuple(
            replace(cost, action_seconds={kind: durations[s, kind] for kind in KINDS if (s, kind) in durations})
            for s, cost in enumerate(costs)
        )
        by_rank = [[costs[s] for s in mine] for mine in of_rank]
        after = max(sum(cost.step_seconds for cost in mine) for mine in by_rank)
        started = self.prices.cluster.gpu.pipeline_step_seconds if len(stages) > 1 else 0.0
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        # Each rank is busy with all of its actions.
        timeline = max(microbatches * sum(sum(cost.action_seconds.values()) for cost in mine) for mine in by_rank)
        is_fast = (started + timeline + after) * slower < known_seconds
        is_simulated = is_fast and max(each["total"] for each in rank_memory) <= room_bytes
        if is_simulated:
            timeline = self._timeline_seconds(costs, durations, order)
        step = started + timeline + after
        busiest_rank = max(range(ranks), key=lambda rank: sum(_busy(cost, microbatches) for cost in by_rank[rank]))
        busiest = by_rank[busiest_rank]
        both = sum((cost.forward + cost.backward for cost in busiest), Seconds())
        once = {name: sum(cost.step[name] for cost in busiest) for name in busiest[0].step}
        breakdown = {"compute": microbatches * both.compute + once["compute"]}
        for axis in reversed(SPLIT_AXES):
            if axis in self.mesh.written:
                breakdown[axis] = microbatches * both.on_axis(axis) + once[axis]
        breakdown["optimizer"] = once["optimizer"]
        busy = microbatches * both.total
        if len(stages) > 1:
            acting = sum(seconds for (s, _), seconds in durations.items() if s in of_rank[busiest_rank])
            longer = microbatches * acting - busy
            breakdown["pipeline_host"] = started + max(0.0, longer)
            breakdown["bubble"] = step - sum(breakdown.values())
        else:
            step = sum(breakdown.values())
        return Evaluated(
            step_seconds=step * slower,
            bubble_fraction=max(0.0, 1 - busy / timeline) if len(stages) > 1 and timeline else 0.0,
            breakdown={name: seconds * slower for name, seconds in breakdown.items()},
            stages=costs,
            rank_memory=tuple(rank_memory),
            is_simulated=is_simulated,
        )

    def _paced(self, costs: Sequence[StageCost], of_rank: Sequence[Sequence[int]]) -> Sequence[StageCost]:
        """The stages as fast as their ranks."""
        if not self.slowdown:
            return costs
        factors = {stage: self.slowdown[rank] for rank, mine in enumerate(of_rank) for stage in mine}
        return [cost.slowed(factors[stage]) for stage, cost in enumerate(costs)]

    def _stage_send_seconds(self, order: Schedule, stage: int, stages: Sequence[tuple[int, int]]) -> float:
        """To the next stage; neighbours on one rank hand on."""
        edge = edge_of(order, stage, self.mesh.pp) if stage + 1 < len(stages) else None
        return 0.0 if edge is None else self.send_seconds(stages[stage][1], edge)

    def _durations(self, costs: Sequence[StageCost], order: Schedule) -> dict[tuple[int, str], float]:
        """Seconds of each action of a microbatch: the device's, or the host's with what the schedule takes of it."""
        gpu = self.prices.cluster.gpu
        action = gpu.pipeline_action_seconds if len(costs) > 1 else 0.0

        def longer(device: float, host: float) -> float:
            return device + action if gpu.is_host else max(device, host + action)

        found = {(s, FORWARD): longer(cost.forward.total, cost.host_forward) for s, cost in enumerate(costs)}
        for s, cost in enumerate(costs):
            whole, host = cost.backward.total, cost.host_backward
            if not order.splits_backward:
                found[s, BACKWARD] = longer(whole, host)
                continue
            # PyTorch leaves the first stage's whole backward to W: it has no input whose gradient anyone waits for.
            weights = cost.weights.total if s else whole
            share = weights / whole if whole else 1.0
            found[s, INPUT_GRADIENT] = longer(whole - weights, host * (1 - share))
            found[s, WEIGHT_GRADIENT] = longer(weights, host * share)
        return found

    def _timeline_seconds(
        self, costs: Sequence[StageCost], durations: Mapping[tuple[int, str], float], order: Schedule
    ) -> float:
        ranks = self.mesh.pp
        sends = [cost.send_seconds for cost in costs[:-1]]
        if len(costs) > ranks and self.prices.stack.interleaved_messages == "waited for":
            # They are sent and received in one call that both sides wait for.
            backward = INPUT_GRADIENT if order.splits_backward else BACKWARD
            durations = dict(durations)
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


def _busy(cost: StageCost, microbatches: int) -> float:
    return microbatches * (cost.forward.total + cost.backward.total) + cost.step_seconds
