"""A complete candidate, lowered -> seconds of every unit, stage and step, and bytes by component on every stage.

Unlike the integer program this reads the lowered program itself: conversions as they are shared, local types as they
come out, what autograd keeps counted once per tensor, host launches against device time per unit, the schedule
simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...cost_models.communication import OVERLAP_SLOWDOWN, OVERLAP_SLOWDOWN_COMPILED, overlapped_seconds
from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.interleaved import interleaved_table
from ...cost_models.memory import COMPUTE_BYTES, Memory, overhead_bytes, state_bytes
from ...cost_models.optimizer import optimizer_seconds
from ...cost_models.timeline import BACKWARD, FORWARD, schedule_seconds
from ...cost_models.work import Work
from ..capture.graph import ITEM_BYTES, ModelGraph
from ..schedules import action_table, get_schedule
from ..sharding.mesh import Mesh
from ..sharding.placement import local_type
from ..sharding.program import Compute, Convert, ModelProgram, Placements, TemplateProgram, Var, model_program
from ..sharding.redistribute import Change
from .kernels import kept_by_kernels, stack_work, stack_works
from .prices import ACCUMULATED_BYTES, Prices, saved_on_device, slowest_of_nodes
from .step_collectives import HeldParameter, held_parameters, padded_bytes, prepared_changes, stage_values

# What is run again before its backward: nothing, every block, every second block, most blocks, the attention kernel of
# each block, or all but attention and every second matrix product of each block.
RECOMPUTE = ("none", "full", "alternate", "most", "attention", "operations")
_NONE, _FULL, _ALTERNATE, _MOST, _ATTENTION, _OPERATIONS = RECOMPUTE
# A pipeline repeats itself after so many microbatches per stage, with a period of at most so many more. Within 2e-4 of
# the whole simulation on random durations.
_SETTLED_ROUNDS, _REPEATED_ROUNDS = 8, 4
# ZeRO-1 reduces gradients and gathers parameters in buckets. Source: defaults of deepspeed.ai/docs/config-json.
_ZERO1_BUCKET_ELEMENTS = 500_000_000
_MOST_OF = 5  # "most": all blocks but every fifth


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
class _StepCost:
    forward: Seconds
    backward: Seconds
    host_forward: float = 0.0
    host_backward: float = 0.0


def _total(steps: Sequence[_StepCost], *, forward: bool) -> Seconds:
    """One direction of a run of steps: the longer of device and host."""
    total = Seconds()
    host = 0.0
    for step in steps:
        total += step.forward if forward else step.backward
        host += step.host_forward if forward else step.host_backward
    return replace(total, compute=max(total.compute, host))


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
    rank_memory_bytes: tuple[int, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return max(self.rank_memory_bytes)


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
    _templates: dict[tuple[int, str], UnitCost] = field(default_factory=dict, init=False)
    _edges: dict[tuple[int, int, int, int], tuple[Seconds, Seconds, int]] = field(default_factory=dict, init=False)
    _units: dict[tuple[object, ...], UnitCost] = field(default_factory=dict, init=False)
    _steps: dict[int, list[_StepCost]] = field(default_factory=dict, init=False)
    _stages: dict[tuple[object, ...], tuple[StageCost, Memory, int]] = field(default_factory=dict, init=False)

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    @cached_property
    def program(self) -> ModelProgram:
        return model_program(self.graph, self.placements, self.mesh)

    @cached_property
    def master_program(self) -> ModelProgram:
        """The same program over the stored dtypes: read for parameters only, so nothing is lowered again."""
        pairs = zip(self.program.templates, self.master.templates, strict=True)
        templates = tuple(replace(lowered, template=template) for lowered, template in pairs)
        return replace(self.program, graph=self.master, templates=templates)

    @cached_property
    def _sharing(self) -> frozenset[int]:
        """Units that hold a tensor which another unit holds too."""
        holders: dict[str, set[int]] = {}
        for index, unit in enumerate(self.graph.units):
            for _, fqn in unit.tensors:
                holders.setdefault(fqn, set()).add(index)
        return frozenset(index for units in holders.values() if len(units) > 1 for index in units)

    # --- units ---

    def unit(self, index: int, *, recompute: bool | str) -> UnitCost:
        """`recompute`: False or True for "none" and "full", or one of RECOMPUTE."""
        policy = self._policy(index, recompute)
        unit = self.graph.units[index]
        sources = tuple((self.graph.units[value.unit].template, value.output) for value in unit.inputs)
        key = (unit.template, policy, sources)
        if key not in self._units:
            cost = self.template(unit.template, recompute=policy)
            forward, backward, kept = cost.forward, cost.backward, 0
            for position in range(len(unit.inputs)):
                ahead, back, size = self._edge(index, position)
                forward, backward, kept = forward + ahead, backward + back, kept + size
            self._units[key] = replace(cost, forward=forward, backward=backward, saved_bytes=cost.saved_bytes + kept)
        return self._units[key]

    def _policy(self, index: int, recompute: bool | str) -> str:
        policy = (_FULL if recompute else _NONE) if isinstance(recompute, bool) else recompute
        if policy not in (_ALTERNATE, _MOST):
            return policy
        mine = self.graph.units[index].template
        before = sum(unit.template == mine for unit in self.graph.units[:index])
        runs_again = before % 2 == 0 if policy == _ALTERNATE else before % _MOST_OF != _MOST_OF - 1
        return _FULL if runs_again else _NONE

    def _edge(self, index: int, position: int) -> tuple[Seconds, Seconds, int]:
        """Conversions at an input; the bytes of what they made are counted by the unit that keeps its input."""
        unit = self.graph.units[index]
        value = unit.inputs[position]
        key = (self.graph.units[value.unit].template, value.output, unit.template, position)
        if key not in self._edges:
            steps = self.program.edge(index, position)[1] if self.program.prepared(index, position) is None else ()
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

    def template(self, index: int, *, recompute: bool | str) -> UnitCost:
        lowered = self.program.templates[index]
        policy = (_FULL if recompute else _NONE) if isinstance(recompute, bool) else recompute
        policy = policy if lowered.template.is_module else _NONE
        key = (index, policy)
        if key not in self._templates:
            if index not in self._steps:
                self._steps[index] = self._step_costs(lowered)
            steps = self._steps[index]
            if policy == _NONE:
                self._templates[key] = self._template(lowered, steps)
            else:
                self._templates[key] = self._recomputed(index, policy, steps)
        return self._templates[key]

    def _recomputed(self, index: int, policy: str, steps: Sequence[_StepCost]) -> UnitCost:
        """Checkpointing: part of the forward runs again before the backward, and what it makes is not kept."""
        plain = self.template(index, recompute=False)
        lowered = self.program.templates[index]
        again = self._again(lowered, policy)
        forward = _total([step for step, runs in zip(steps, again, strict=True) if runs], forward=True)
        if policy == _FULL:
            kept = sum(
                local_type(lowered.template.type_of(made.ref), made.layout, self.mesh.axes).num_bytes
                for made in lowered.inputs
                if lowered.template.type_of(made.ref).requires_grad
            )
            working = plain.working_bytes + plain.saved_bytes
        else:
            kept, _ = self._kept(lowered, without=again)
            working = plain.working_bytes + plain.saved_bytes - kept
        return UnitCost(
            forward=plain.forward, backward=plain.backward + forward, saved_bytes=kept, working_bytes=working
        )

    def _again(self, lowered: TemplateProgram, policy: str) -> list[bool]:
        """Which steps of a template run again."""
        if policy == _ATTENTION:
            return [isinstance(step, Compute) and "attention" in step.node.op for step in lowered.steps]
        if policy == _OPERATIONS:
            found: list[bool] = []
            products = 0
            for step in lowered.steps:
                if isinstance(step, Convert):
                    found.append(False)
                    continue
                forward = stack_work(step.node, step.operand_types, step.outputs, self.prices.stack).forward
                products += bool(forward.gemms)
                found.append(not forward.attention_flops and (not forward.gemms or products % 2 == 0))
            return found
        last = len(lowered.steps)
        if self.prices.stack.recompute == "until last saved":
            last = 0
            for index, step in enumerate(lowered.steps):
                if isinstance(step, Compute) and any(value.requires_grad for value in step.outputs):
                    saved = saved_on_device(step.node, step.operand_types, step.outputs)
                    # An operand is kept before the operation runs, a result after it.
                    if saved.outputs or saved.extra_bytes:
                        last = index + 1
                    elif saved.operands:
                        last = index
        return [index < last for index in range(len(lowered.steps))]

    def _step_costs(self, lowered: TemplateProgram) -> list[_StepCost]:
        gpu, stack = self.prices.cluster.gpu, self.prices.stack
        # Fused traffic is left out below: what remains runs as eager kernels do.
        priced = replace(stack, fusion="eager")
        found: list[_StepCost] = []
        for step, work in zip(lowered.steps, stack_works(lowered, stack), strict=True):
            if isinstance(step, Convert) or work is None:
                assert isinstance(step, Convert)
                ahead, back = self._changes_seconds((step.change,))
                found.append(_StepCost(forward=ahead, backward=back))
                continue
            forward = Seconds(compute=device_seconds(work.forward, gpu, dtype=work.dtype, stack=priced))
            backward = Seconds(
                compute=device_seconds(work.backward, gpu, dtype=work.dtype, stack=priced, is_backward=True)
            )
            for use in step.collectives:
                seconds = self.prices.use_seconds(use.axis, use.op, use.num_bytes)
                if use.phase == "forward":
                    forward += _on_axis(use.axis, seconds)
                else:
                    backward += _on_axis(use.axis, seconds)
            found.append(
                _StepCost(
                    forward=forward,
                    backward=backward,
                    host_forward=host_seconds(work.forward, gpu, stack=priced),
                    host_backward=host_seconds(work.backward, gpu, stack=priced),
                )
            )
        return found

    def _template(self, lowered: TemplateProgram, steps: Sequence[_StepCost]) -> UnitCost:
        saved, working = self._kept(lowered)
        return UnitCost(
            forward=_total(steps, forward=True),
            backward=_total(steps, forward=False),
            saved_bytes=saved,
            working_bytes=working,
        )

    def _work(self, step: Compute) -> Work:
        return stack_work(step.node, step.operand_types, step.outputs, self.prices.stack)

    def _kept(self, lowered: TemplateProgram, without: Sequence[bool] = ()) -> tuple[int, int]:
        """Bytes that autograd keeps of one unit, every tensor once (views are their base), and the largest result."""
        template = lowered.template
        base: dict[Var, Var] = {}
        sizes: dict[Var, int] = {}
        parts: dict[Var, int] = {}
        extra = 0
        largest = 0
        held = {made for made in lowered.tensors}
        held.update(made for made in lowered.inputs if not template.type_of(made.ref).requires_grad)
        for index, step in enumerate(lowered.steps):
            if isinstance(step, Convert):
                gathers = step.change.conversion.forward == "all_gather"
                if gathers and self.prices.stack.gathered_inputs == "gathered again":
                    base[step.target] = base.get(step.source, step.source)
                    parts[base[step.target]] = step.change.before.num_bytes
                continue
            work = self._work(step)
            for result, value in zip(step.results, step.outputs, strict=True):
                largest = max(largest, value.num_bytes)
                if step.operands and not work.forward.kernels and not work.forward.bytes:
                    base[result] = base.get(step.operands[0], step.operands[0])
            if not any(value.requires_grad for value in step.outputs):
                continue
            if without and without[index]:
                continue
            saved = saved_on_device(step.node, step.operand_types, step.outputs)
            extra += saved.extra_bytes + kept_by_kernels(step.node, step.operand_types, self.prices.stack)
            kept = [(step.operands[i], step.operand_types[i].num_bytes) for i in saved.operands]
            kept += [(step.results[i], step.outputs[i].num_bytes) for i in saved.outputs]
            for made, size in kept:
                root = base.get(made, made)
                if root not in held:
                    sizes[root] = max(sizes.get(root, 0), min(size, parts.get(root, size)))
        return sum(sizes.values()) + extra, 2 * largest

    # --- stages ---

    def unit_state_bytes(self, index: int, zero: int) -> int:
        """Parameters, gradients and optimizer state of one unit, for the cut."""
        stored = held_parameters(self.master_program, index, index + 1)
        held = held_parameters(self.program, index, index + 1)
        parts = self._with_activations(self._memory((), held, stored, zero), 0, 1)
        return parts["total"] - parts["overhead"]

    def stage(self, first: int, last: int, *, in_flight: float, zero: int, recompute: bool | str) -> StageCost:
        key = (*self._kind_of_stage(first, last, recompute), zero, recompute)
        if key not in self._stages:
            self._stages[key] = self._stage(first, last, zero, recompute)
        cost, still, saved = self._stages[key]
        return replace(cost, memory_bytes=self._with_activations(still, saved, in_flight))

    def _kind_of_stage(self, first: int, last: int, recompute: bool | str) -> tuple[object, ...]:
        """Equal for stages that cost the same: the same templates in the same order, and the same shared tensors."""
        if recompute in (_ALTERNATE, _MOST):
            return first, last
        shared = tuple(index for index in self._sharing if first <= index < last)
        return first <= 1, shared, tuple(unit.template for unit in self.graph.units[max(first, 1) : last])

    def _stage(self, first: int, last: int, zero: int, recompute: bool | str) -> tuple[StageCost, Memory, int]:
        """Cost without memory, memory without activations, and what one microbatch saves."""
        units = [self.unit(index, recompute=recompute) for index in range(max(first, 1), last)]
        forward, backward = Seconds(), Seconds()
        for unit in units:
            forward, backward = forward + unit.forward, backward + unit.backward
        held = held_parameters(self.program, first, last)
        stored = held_parameters(self.master_program, first, last)
        prelude = self.template(self.graph.units[0].template, recompute=False).forward
        prelude += self._changes_seconds(prepared_changes(self.program, first, last))[0]
        copied_ahead, copied_back = self._fsdp_copy_seconds(held, zero)
        forward += Seconds(compute=copied_ahead)
        backward += Seconds(compute=self._accumulation_seconds(held, zero) + copied_back)
        step = {
            "compute": prelude.compute,
            "dp": prelude.dp + self._dp_seconds(held, zero, forward.compute, backward.compute),
            "tp": prelude.tp + self._partial_seconds(held, zero),
            "optimizer": self._optimizer_seconds(stored, zero),
        }
        cost = StageCost(
            forward=forward,
            backward=backward,
            step=step,
            send_seconds=0.0,
            memory_bytes={},
            num_parameters=sum(_numel(parameter) for parameter in stored),
        )
        return cost, self._memory(units, held, stored, zero), sum(unit.saved_bytes for unit in units)

    def send_seconds(self, boundary: int, edge: int) -> float:
        """Messages of one microbatch before unit `boundary`, from pipeline stage `edge` to the next."""
        if boundary >= len(self.graph.units):
            return 0.0
        seconds = 0.0
        for value in stage_values(self.program, boundary):
            layout = self.program.templates[self.graph.units[value.unit].template].outputs[value.output].layout
            size = local_type(self.graph.type_of(value), layout, self.mesh.axes).num_bytes
            if self.prices.stack.pipeline_messages == "scattered":
                seconds += self.prices.send_seconds(size // self.mesh.tp, edge)
                seconds += self.prices.use_seconds("tp", "all_gather", size)
            else:
                seconds += self.prices.send_seconds(size, edge)
        return seconds

    def _accumulation_seconds(self, held: Sequence[HeldParameter], zero: int) -> float:
        """Adding one microbatch's gradients to the sum of those before."""
        gpu = self.prices.cluster.gpu
        if self.mesh.microbatches == 1 or (zero >= 2 and self.prices.stack.accumulation == "sharded"):
            return 0.0
        numel = sum(_numel(parameter) for parameter in held if parameter.trainable)
        traffic = numel * ACCUMULATED_BYTES[self.prices.stack.gradient_dtype]
        return traffic / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)

    def _reduced_bytes(self, num_bytes: int, dtype: str) -> int:
        """Bytes of a gradient as it is reduced."""
        if self.prices.stack.gradient_dtype == "float32":
            return num_bytes * max(1, ITEM_BYTES["float32"] // ITEM_BYTES[dtype])
        return num_bytes

    def _dp_seconds(self, held: Sequence[HeldParameter], zero: int, forward: float, backward: float) -> float:
        """Exposed seconds a step. `forward` and `backward`: compute of one microbatch, behind which FSDP hides."""
        if self.mesh.dp == 1:
            return 0.0
        trainable = [parameter for parameter in held if parameter.trainable]
        if zero < 2:
            return self._all_reduce_seconds(trainable, zero, backward)
        return self._fsdp_seconds(held, trainable, zero, forward, backward)

    def _all_reduce_seconds(self, trainable: Sequence[HeldParameter], zero: int, backward: float) -> float:
        """ZeRO-1 gathers what each rank has updated."""
        sizes: dict[str, int] = {}
        for parameter in trainable:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + _bytes(parameter)
        seconds = sum(
            self.prices.use_seconds("dp", "all_reduce", self._reduced_bytes(size, dtype))
            + (self.prices.use_seconds("dp", "all_gather", size) if zero == 1 else 0.0)
            for dtype, size in sizes.items()
        )
        sync = self.prices.stack.gradient_sync
        if sync == "hidden" or (sync == "hidden without tp" and self.mesh.tp == 1):
            return self._exposed(backward, seconds)
        return seconds

    def _fsdp_seconds(
        self,
        held: Sequence[HeldParameter],
        trainable: Sequence[HeldParameter],
        zero: int,
        forward: float,
        backward: float,
    ) -> float:
        stack, times = self.prices.stack, self.mesh.microbatches
        shards = self.mesh.dp // self.prices.replicas
        price = self.prices.use_seconds
        gathers = [price("shard", "all_gather", size) for size in _by_group(held, shards).values()]
        scattered = {
            group: self._reduced_bytes(size, trainable[0].dtype) for group, size in _by_group(trainable, shards).items()
        }
        scatters = [
            price("shard", "reduce_scatter", size) + price("replica", "all_reduce", size // shards)
            for size in scattered.values()
        ]
        gather, scatter = sum(gathers), sum(scatters)
        is_kept = zero == 2 or stack.resharding == "never"
        is_sharded = stack.accumulation == "sharded"
        ahead = gather if is_kept else times * gather
        back = (times if is_sharded else 1) * (scatter if is_kept else gather + scatter)
        if stack.fsdp_overlap == "without tp" and self.mesh.tp > 1:
            return ahead + back
        # Nothing computes while the first group is gathered and the last reduced.
        never_hidden = max(gathers, default=0.0) + max(scatters, default=0.0)
        hiding_ahead = forward * (times if ahead > gather else 1)
        hiding_back = backward * (times if stack.accumulation == "sharded" else 1)
        return max(never_hidden, self._exposed(hiding_ahead, ahead) + self._exposed(hiding_back, back))

    def _exposed(self, compute: float, communication: float) -> float:
        """What communication beside compute adds to it."""
        compiled = self.prices.stack.fusion == "compiled"
        slowdown = OVERLAP_SLOWDOWN_COMPILED if compiled else OVERLAP_SLOWDOWN
        return overlapped_seconds(compute, communication, slowdown=slowdown) - compute

    def _fsdp_copy_seconds(self, held: Sequence[HeldParameter], zero: int) -> tuple[float, float]:
        """Copies out of gathered buffers and into reduced ones, forward and backward of one microbatch."""
        stack, gpu = self.prices.stack, self.prices.cluster.gpu
        if zero < 2 or self.mesh.dp == 1 or stack.fsdp == "flat":
            return 0.0, 0.0
        size = sum(map(_bytes, held))
        reduced = self._reduced_bytes(size, held[0].dtype) if held else 0
        rate = gpu.hbm_bytes_per_second * gpu.hbm_fraction
        is_kept = zero == 2 or stack.resharding == "never"
        times = 1 if stack.accumulation == "sharded" else 1 / self.mesh.microbatches
        ahead = 2 * size / rate * (1 / self.mesh.microbatches if is_kept else 1)
        back = (size + reduced) / rate * times
        return ahead, back if is_kept else back + 2 * size / rate * times

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
        zero: int,
    ) -> Memory:
        """Peak bytes without activations and overhead. Under ZeRO with several microbatches FSDP2 keeps gathered
        parameters and unreduced gradients until the last backward; with one only those of the groups at work."""
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
        memory = self._as_kept(memory)
        if zero == 1 and dp > 1:
            bucket = min(_ZERO1_BUCKET_ELEMENTS * COMPUTE_BYTES[self.precision], sum(map(_bytes, held)))
            memory = replace(memory, gather_buffers=2 * bucket)
        if zero >= 2 and dp > 1:
            stack, is_accumulated = self.prices.stack, self.mesh.microbatches > 1
            keeps_gradients = is_accumulated and stack.accumulation == "unsharded"
            whole = sum(_by_group(held, dp).values()) if keeps_gradients or stack.resharding == "never" else 0
            if keeps_gradients:
                whole += sum(_by_group([p for p in held if p.trainable], dp).values())
            memory = replace(memory, gather_buffers=max(memory.gather_buffers, whole))
        return memory + Memory(temporary=max((unit.working_bytes for unit in units), default=0))

    def _with_activations(self, memory: Memory, saved_bytes: int, in_flight: float) -> dict[str, int]:
        memory = replace(memory, activations=int(in_flight * saved_bytes))
        memory += overhead_bytes(memory, self.prices.cluster.gpu)
        return memory.by_component()

    def _as_kept(self, memory: Memory) -> Memory:
        """States in the dtypes that the stack keeps them in."""
        share = COMPUTE_BYTES[self.precision] / COMPUTE_BYTES["fp32"]
        if self.prices.stack.states == "float32 master" or share == 1:
            return memory
        if self.prices.stack.states == "float32 master, both gradients":
            return replace(memory, gradients=int(memory.gradients * (1 + share)))
        lower = replace(memory, gradients=int(memory.gradients * share))
        if self.prices.stack.states != "compute dtype":
            return lower
        # Parameters are stored as they compute: no masters, and what was gathered is no second copy.
        stored = int(memory.master_weights * share)
        return replace(
            lower,
            parameters=max(memory.parameters, stored),
            master_weights=0,
            optimizer=int(memory.optimizer * share),
        )

    # --- the step ---

    def evaluate(
        self,
        stages: Sequence[tuple[int, int]],
        *,
        schedule: str,
        zero: int,
        activation_checkpoint: str,
        interleave: int = 1,
    ) -> Evaluated:
        """Price a complete candidate.

        `interleave`: stages per rank; stage s lies on rank s modulo pp and runs as in interleaved 1F1B.
        """
        microbatches = self.mesh.microbatches
        ranks = len(stages) // interleave
        costs = tuple(
            replace(
                self.stage(
                    first,
                    last,
                    in_flight=self._in_flight(s, ranks, schedule, interleave),
                    zero=zero,
                    recompute=activation_checkpoint,
                ),
                send_seconds=self.send_seconds(last, s % ranks),
            )
            for s, (first, last) in enumerate(stages)
        )
        timeline = self._timeline_seconds(costs, schedule, interleave)
        by_rank = [costs[rank::ranks] for rank in range(ranks)]
        after = max(sum(cost.step_seconds for cost in mine) for mine in by_rank)
        step = timeline + after
        busiest = max(by_rank, key=lambda mine: sum(_busy(cost, microbatches) for cost in mine))
        both = sum((cost.forward + cost.backward for cost in busiest), Seconds())
        once = {name: sum(cost.step[name] for cost in busiest) for name in busiest[0].step}
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
        slower = slowest_of_nodes(self.mesh, self.prices.cluster)
        return Evaluated(
            step_seconds=step * slower,
            bubble_fraction=max(0.0, 1 - busy / timeline) if len(stages) > 1 and timeline else 0.0,
            breakdown={name: seconds * slower for name, seconds in breakdown.items()},
            stages=costs,
            rank_memory_bytes=tuple(map(_rank_bytes, by_rank)),
        )

    def _in_flight(self, stage: int, ranks: int, schedule: str, interleave: int) -> float:
        microbatches = self.mesh.microbatches
        if interleave == 1:
            return get_schedule(schedule).in_flight(stage, ranks, microbatches)
        warmup = 2 * (ranks - stage % ranks - 1) + (interleave - 1) * ranks + 1
        return min(microbatches, warmup / interleave)

    def _timeline_seconds(self, costs: Sequence[StageCost], schedule: str, interleave: int) -> float:
        microbatches = self.mesh.microbatches
        sends = [cost.send_seconds for cost in costs[:-1]]
        durations = {(s, FORWARD): cost.forward.total for s, cost in enumerate(costs)}
        durations |= {(s, BACKWARD): cost.backward.total for s, cost in enumerate(costs)}
        if interleave == 1:
            return _simulated(schedule, microbatches, durations, sends)
        # Its messages are sent and received in one call that both sides wait for.
        for s, seconds in enumerate(sends):
            durations[s, FORWARD] += seconds
            durations[s + 1, BACKWARD] += seconds
        table = interleaved_table(len(costs) // interleave, interleave, microbatches)
        return schedule_seconds(table, durations)


def _simulated(
    schedule: str, microbatches: int, durations: Mapping[tuple[int, str], float], sends: Sequence[float]
) -> float:
    """Seconds of a schedule. Far beyond warm-up every further microbatch takes as long as the one before."""
    stages = len(sends) + 1
    settled, repeated = _SETTLED_ROUNDS * stages, _REPEATED_ROUNDS * stages

    def seconds(count: int) -> float:
        return schedule_seconds(action_table(schedule, stages, count), durations, sends)

    if stages == 1 or microbatches <= settled + repeated:
        return seconds(microbatches)
    before = seconds(settled)
    return before + (microbatches - settled) * (seconds(settled + repeated) - before) / repeated


def _busy(cost: StageCost, microbatches: int) -> float:
    return microbatches * (cost.forward.total + cost.backward.total) + cost.step_seconds


def _rank_bytes(stages: Sequence[StageCost]) -> int:
    """Peak bytes of a rank: what its stages hold together, and the largest of what they need in turn."""
    shared = ("gather_buffers", "temporary", "overhead", "total")
    held = sum(size for cost in stages for name, size in cost.memory_bytes.items() if name not in shared)
    return held + sum(max(cost.memory_bytes[name] for cost in stages) for name in shared[:-1])


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
