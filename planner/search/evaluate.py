"""A complete candidate, lowered -> seconds of every unit, stage and step, and bytes by component on every stage.

Unlike the integer program this reads the lowered program itself: conversions as they are shared, local types as they
come out, what autograd keeps counted once per tensor, host launches against device time per unit, the schedule
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.memory import Memory, overhead_bytes, state_bytes
from ...cost_models.optimizer import optimizer_seconds
from ...cost_models.timeline import BACKWARD, FORWARD, schedule_seconds
from ...cost_models.work import Work
from ..capture.graph import ITEM_BYTES, ModelGraph
from ..schedules import action_table, get_schedule
from ..sharding.mesh import Mesh
from ..sharding.placement import local_type
from ..sharding.program import Compute, Convert, ModelProgram, Placements, TemplateProgram, Var, model_program
from ..sharding.redistribute import Change
from .prices import Prices, local_work, saved_by
from .step_collectives import HeldParameter, held_parameters, padded_bytes, stage_values

_RECOMPUTE = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """One direction of a unit in one microbatch: what computes, and collectives by axis."""

    compute: float = 0.0
    tp: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.dp

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(compute=self.compute + other.compute, tp=self.tp + other.tp, dp=self.dp + other.dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """A unit in one microbatch. `saved_bytes` is kept until its backward; `working_bytes` lives only while it runs."""

    forward: Seconds
    backward: Seconds
    saved_bytes: int
    working_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    forward: Seconds
    backward: Seconds
    step: Mapping[str, float]  # once a step: dp, tp, optimizer, prelude
    send_seconds: float  # to the next stage, one microbatch
    memory_bytes: Mapping[str, int]
    num_parameters: int

    @property
    def step_seconds(self) -> float:
        return sum(self.step.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What a candidate costs. `breakdown` is of the busiest stage and sums to `step_seconds`."""

    step_seconds: float
    bubble_fraction: float
    breakdown: Mapping[str, float]
    stages: tuple[StageCost, ...]

    @property
    def memory_bytes(self) -> int:
        return max(stage.memory_bytes["total"] for stage in self.stages)


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
    _templates: dict[tuple[int, bool], UnitCost] = field(default_factory=dict, init=False)
    _edges: dict[tuple[int, int, int, int], tuple[Seconds, Seconds, int]] = field(default_factory=dict, init=False)
    _units: dict[tuple[int, bool], UnitCost] = field(default_factory=dict, init=False)
    _stages: dict[tuple[object, ...], StageCost] = field(default_factory=dict, init=False)

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    @cached_property
    def program(self) -> ModelProgram:
        return model_program(self.graph, self.placements, self.mesh)

    @cached_property
    def master_program(self) -> ModelProgram:
        return self.program if self.master is self.graph else model_program(self.master, self.placements, self.mesh)

    # --- units ---

    def unit(self, index: int, *, recompute: bool) -> UnitCost:
        key = (index, recompute)
        if key not in self._units:
            unit = self.graph.units[index]
            cost = self.template(unit.template, recompute=recompute)
            forward, backward, kept = cost.forward, cost.backward, 0
            for position in range(len(unit.inputs)):
                ahead, back, size = self._edge(index, position)
                forward, backward, kept = forward + ahead, backward + back, kept + size
            self._units[key] = replace(cost, forward=forward, backward=backward, saved_bytes=cost.saved_bytes + kept)
        return self._units[key]

    def _edge(self, index: int, position: int) -> tuple[Seconds, Seconds, int]:
        """Conversions at an input; the bytes of what they made are counted by the unit that keeps its input."""
        unit = self.graph.units[index]
        value = unit.inputs[position]
        key = (self.graph.units[value.unit].template, value.output, unit.template, position)
        if key not in self._edges:
            _, steps = self.program.edge(index, position)
            forward, backward = self._changes_seconds(steps)
            self._edges[key] = forward, backward, 0
        return self._edges[key]

    def _changes_seconds(self, steps: Sequence[Change]) -> tuple[Seconds, Seconds]:
        forward, backward = Seconds(), Seconds()
        for step in steps:
            axis = self.mesh.axis(step.axis)
            if axis.is_time:
                continue
            ahead, back = self.prices.uses_seconds(step.collectives(axis))
            copy_ahead, copy_back = self.prices.copies(step)
            forward += _on_axis(step.axis, ahead) + Seconds(compute=copy_ahead)
            backward += _on_axis(step.axis, back) + Seconds(compute=copy_back)
        return forward, backward

    def template(self, index: int, *, recompute: bool) -> UnitCost:
        lowered = self.program.templates[index]
        recompute = recompute and lowered.template.is_module
        key = (index, recompute)
        if key not in self._templates:
            self._templates[key] = self._recomputed(index) if recompute else self._template(lowered)
        return self._templates[key]

    def _recomputed(self, index: int) -> UnitCost:
        """Full activation checkpointing: only inputs are kept, the forward runs again before the backward."""
        plain = self.template(index, recompute=False)
        lowered = self.program.templates[index]
        inputs = sum(
            local_type(lowered.template.type_of(made.ref), made.layout, self.mesh.axes).num_bytes
            for made in lowered.inputs
            if lowered.template.type_of(made.ref).requires_grad
        )
        return UnitCost(
            forward=plain.forward,
            backward=plain.backward + plain.forward,
            saved_bytes=inputs,
            working_bytes=plain.working_bytes + plain.saved_bytes,
        )

    def _template(self, lowered: TemplateProgram) -> UnitCost:
        gpu, stack = self.prices.cluster.gpu, self.prices.stack
        forward, backward = Seconds(), Seconds()
        host_forward = host_backward = 0.0
        for step in lowered.steps:
            if isinstance(step, Convert):
                ahead, back = self._changes_seconds((step.change,))
                forward, backward = forward + ahead, backward + back
                continue
            work = self._work(step)
            forward += Seconds(compute=device_seconds(work.forward, gpu, dtype=work.dtype, stack=stack))
            back_seconds = device_seconds(work.backward, gpu, dtype=work.dtype, stack=stack, is_backward=True)
            backward += Seconds(compute=back_seconds)
            host_forward += host_seconds(work.forward, gpu, stack=stack)
            host_backward += host_seconds(work.backward, gpu, stack=stack)
            for use in step.collectives:
                seconds = self.prices.use_seconds(use.axis, use.op, use.num_bytes)
                if use.phase == "forward":
                    forward += _on_axis(use.axis, seconds)
                else:
                    backward += _on_axis(use.axis, seconds)
        saved, working = self._kept(lowered)
        return UnitCost(
            forward=replace(forward, compute=max(forward.compute, host_forward)),
            backward=replace(backward, compute=max(backward.compute, host_backward)),
            saved_bytes=saved,
            working_bytes=working,
        )

    def _work(self, step: Compute) -> Work:
        return local_work(step.node, step.operand_types, step.outputs)

    def _kept(self, lowered: TemplateProgram) -> tuple[int, int]:
        """Bytes that autograd keeps of one unit, every tensor once (views are their base), and the largest result."""
        template = lowered.template
        base: dict[Var, Var] = {}
        sizes: dict[Var, int] = {}
        extra = 0
        largest = 0
        held = {made for made in lowered.tensors}
        held.update(made for made in lowered.inputs if not template.type_of(made.ref).requires_grad)
        for step in lowered.steps:
            if isinstance(step, Convert):
                continue
            work = self._work(step)
            for result, value in zip(step.results, step.outputs, strict=True):
                largest = max(largest, value.num_bytes)
                if step.operands and not work.forward.kernels and not work.forward.bytes:
                    base[result] = base.get(step.operands[0], step.operands[0])
            if not any(value.requires_grad for value in step.outputs):
                continue
            saved = saved_by(step.node)
            extra += saved.extra_bytes
            kept = [(step.operands[i], step.operand_types[i].num_bytes) for i in saved.operands]
            kept += [(step.results[i], step.outputs[i].num_bytes) for i in saved.outputs]
            for made, size in kept:
                root = base.get(made, made)
                if root not in held:
                    sizes[root] = max(sizes.get(root, 0), size)
        return sum(sizes.values()) + extra, 2 * largest

    # --- stages ---

    def unit_state_bytes(self, index: int, zero: int) -> int:
        """Parameters, gradients and optimizer state of one unit, for the cut."""
        stored = held_parameters(self.master_program, index, index + 1)
        held = held_parameters(self.program, index, index + 1)
        parts = self._memory((), held, stored, 1, zero)
        return parts["total"] - parts["overhead"]

    def stage(self, first: int, last: int, *, in_flight: int, zero: int, recompute: bool) -> StageCost:
        key = (first, last, in_flight, zero, recompute)
        if key not in self._stages:
            self._stages[key] = self._stage(first, last, in_flight, zero, recompute)
        return self._stages[key]

    def _stage(self, first: int, last: int, in_flight: int, zero: int, recompute: bool) -> StageCost:
        units = [self.unit(index, recompute=recompute) for index in range(max(first, 1), last)]
        forward, backward = Seconds(), Seconds()
        for unit in units:
            forward, backward = forward + unit.forward, backward + unit.backward
        held = held_parameters(self.program, first, last)
        stored = held_parameters(self.master_program, first, last)
        prelude = self.template(self.graph.units[0].template, recompute=False)
        compute = (forward + backward).compute
        step = {
            "compute": prelude.forward.compute,
            "dp": prelude.forward.dp + self._dp_seconds(held, zero, compute),
            "tp": prelude.forward.tp + self._partial_seconds(held, zero),
            "optimizer": self._optimizer_seconds(stored, zero),
        }
        return StageCost(
            forward=forward,
            backward=backward,
            step=step,
            send_seconds=self.send_seconds(last),
            memory_bytes=self._memory(units, held, stored, in_flight, zero),
            num_parameters=sum(_numel(parameter) for parameter in stored),
        )

    def send_seconds(self, boundary: int) -> float:
        if boundary >= len(self.graph.units):
            return 0.0
        seconds = 0.0
        for value in stage_values(self.program, boundary):
            layout = self.program.templates[self.graph.units[value.unit].template].outputs[value.output].layout
            size = local_type(self.graph.type_of(value), layout, self.mesh.axes).num_bytes
            seconds += self.prices.use_seconds("pp", "send", size)
        return seconds

    def _dp_seconds(self, held: Sequence[HeldParameter], zero: int, compute_seconds: float) -> float:
        """Exposed seconds a step. FSDP hides behind the compute of the microbatches in which it communicates."""
        dp, price = self.mesh.dp, self.prices.use_seconds
        if dp == 1:
            return 0.0
        trainable = [parameter for parameter in held if parameter.trainable]
        if zero < 2:
            sizes: dict[str, int] = {}
            for parameter in trainable:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + _bytes(parameter)
            return sum(price("dp", "all_reduce", size) for size in sizes.values())
        gathers = _by_group(held, dp)
        scatters = _by_group(trainable, dp)
        times = 1 if zero == 2 else self.mesh.microbatches + 1
        gather = {group: price("dp", "all_gather", size) for group, size in gathers.items()}
        scatter = {group: price("dp", "reduce_scatter", size) for group, size in scatters.items()}
        total = times * sum(gather.values()) + sum(scatter.values())
        never_hidden = max(gather.values(), default=0.0) + max(scatter.values(), default=0.0)
        hiding = compute_seconds * min(times, self.mesh.microbatches)
        return max(never_hidden, total - hiding)

    def _partial_seconds(self, held: Sequence[HeldParameter], zero: int) -> float:
        """The bucketed all_reduce of replicated parameters with partial gradients on tp."""
        shards = self.mesh.dp if zero >= 2 else 1
        partial = sum(_bytes(p) for p in held if "tp" in p.partial)
        return self.prices.use_seconds("tp", "all_reduce", partial // shards) if partial else 0.0

    def _optimizer_seconds(self, stored: Sequence[HeldParameter], zero: int) -> float:
        shards = self.mesh.dp if zero >= 2 else 1
        size = sum(_bytes(parameter) for parameter in stored if parameter.trainable) // shards
        tensors = sum(parameter.trainable for parameter in stored)
        return optimizer_seconds(size, self.prices.cluster.gpu, optimizer=self.optimizer, num_tensors=tensors)

    def _memory(
        self,
        units: Sequence[UnitCost],
        held: Sequence[HeldParameter],
        stored: Sequence[HeldParameter],
        in_flight: int,
        zero: int,
    ) -> dict[str, int]:
        """Peak bytes by component. Under ZeRO with several microbatches FSDP2 keeps gathered parameters and unreduced
        gradients until the last backward; with one microbatch only those of the groups at work."""
        dp = self.mesh.dp
        trained = sum(_bytes(parameter) for parameter in stored if parameter.trainable)
        frozen = sum(_bytes(parameter) for parameter in stored if not parameter.trainable)
        memory = state_bytes(
            trained,
            zero=zero,
            dp=dp,
            optimizer=self.optimizer,
            precision=self.precision,
            largest_unit_bytes=max(_by_group(stored, 1).values(), default=0),
            frozen_bytes=frozen,
        )
        if zero >= 2 and dp > 1 and self.mesh.microbatches > 1:
            gathered = sum(_by_group(held, dp).values())
            unreduced = sum(_by_group([p for p in held if p.trainable], dp).values())
            memory = replace(memory, gather_buffers=max(memory.gather_buffers, gathered + unreduced))
        memory += Memory(
            activations=in_flight * sum(unit.saved_bytes for unit in units),
            temporary=max((unit.working_bytes for unit in units), default=0),
        )
        memory += overhead_bytes(memory, self.prices.cluster.gpu)
        return memory.by_component()

    # --- the step ---

    def evaluate(
        self, stages: Sequence[tuple[int, int]], *, schedule: str, zero: int, activation_checkpoint: str
    ) -> Evaluated:
        """Price a complete candidate."""
        recompute = activation_checkpoint == _RECOMPUTE
        in_flight = get_schedule(schedule).in_flight
        microbatches = self.mesh.microbatches
        costs = tuple(
            self.stage(first, last, in_flight=in_flight(s, len(stages), microbatches), zero=zero, recompute=recompute)
            for s, (first, last) in enumerate(stages)
        )
        durations = {(s, FORWARD): cost.forward.total for s, cost in enumerate(costs)}
        durations |= {(s, BACKWARD): cost.backward.total for s, cost in enumerate(costs)}
        timeline = schedule_seconds(
            action_table(schedule, len(costs), microbatches), durations, [cost.send_seconds for cost in costs[:-1]]
        )
        after = max(cost.step_seconds for cost in costs)
        step = timeline + after
        busiest = max(costs, key=lambda c: microbatches * (c.forward.total + c.backward.total) + c.step_seconds)
        once = busiest.step
        both = busiest.forward + busiest.backward
        breakdown = {
            "compute": microbatches * both.compute + once["compute"],
            "tp": microbatches * both.tp + once["tp"],
            "dp": microbatches * both.dp + once["dp"],
            "optimizer": once["optimizer"],
        }
        if len(stages) > 1:
            breakdown["bubble"] = step - sum(breakdown.values())
        else:
            step = sum(breakdown.values())
        busy = microbatches * both.total
        return Evaluated(
            step_seconds=step,
            bubble_fraction=max(0.0, 1 - busy / timeline) if len(stages) > 1 and timeline else 0.0,
            breakdown=breakdown,
            stages=costs,
        )


def _on_axis(axis: str, seconds: float) -> Seconds:
    return Seconds(tp=seconds) if axis == "tp" else Seconds(dp=seconds)


def _numel(parameter: HeldParameter) -> int:
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def _bytes(parameter: HeldParameter) -> int:
    return _numel(parameter) * ITEM_BYTES[parameter.dtype]


def _by_group(held: Sequence[HeldParameter], dp: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for parameter in held:
        sizes[parameter.group] = sizes.get(parameter.group, 0) + padded_bytes(parameter, dp)
    return sizes
