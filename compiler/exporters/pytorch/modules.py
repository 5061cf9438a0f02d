"""What the classes of sharded_model.py are called and hold: decided once, read by everything that writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....planner.capture.graph import Kind, Unit, Value
from ....planner.checkpointing import Checkpointing, by_unit, policy_of
from ....planner.errors import AutoparError
from ....planner.schedules import get_schedule
from ....planner.search.step_collectives import is_partial, reduced_over
from ....planner.sharding.mesh import PARAMETER_AXES
from ....planner.sharding.program import Compute
from ....planner.sharding.rules import SeedRef, kept_kernels
from ....planner.zero import KEPT, stage_of, stages_by_unit
from ...held import PRELUDE, HeldTensor
from ...lower import LoweredModel, Run, StageProgram
from ...text import identifier
from .naming import value_names
from .options import Options

RESERVED = frozenset(
    (
        "self", "torch", "F", "nn", "dist", "mesh", "device", "microbatch", "values", "inputs", "at", "block",
        "checkpoint", "keep_results", "local", "layers", "number", "recomputed", "run_block",
    )
)  # fmt: skip
CLASSES = (
    "Weights", "Stage", "FirstStage", "MiddleStage", "LastStage", "ContiguousStage", "GatheredStage", "DTensor",
    "Replicate", "Shard", "DeviceMesh",
)  # fmt: skip
# Operations that update the buffers they are given whenever they run.
UPDATES_STATISTICS = ("aten.batch_norm.default", "aten.instance_norm.default")
RANDOM_OPERATIONS = 1000  # numbers set aside for the random operations of one unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Numbered blocks that all pipeline stages have a run of: a stage is given its numbers.

    `ranges`: [first, last) by stage. `offset`: the index of a block's unit less its number.
    """

    parent: str  # "h"
    template: int
    ranges: tuple[tuple[int, int], ...]
    offset: int

    def holds(self, unit: Unit) -> bool:
        return unit.template == self.template and unit.fqn.rpartition(".")[0] == self.parent


class Modules:
    """The model's modules and the names in their methods."""

    def __init__(self, model: LoweredModel, options: Options, reserved: frozenset[str]) -> None:
        self.model = model
        self.options = options
        self.program = model.program
        self.graph = model.graph
        self.mesh = model.program.mesh
        self.reserved = RESERVED | reserved
        self.handles = {axis.name: f"self.{axis.name}" for axis in self.mesh.axes if not axis.is_time}

    @property
    def is_pipeline(self) -> bool:
        return self.mesh.pp > 1

    @property
    def has_several_stages(self) -> bool:
        """Whether a rank's stages are a list, of one or more: what the schedule's class asks for."""
        return get_schedule(self.options.schedule).is_multi_stage

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of a stage's inputs and of its weights come from calls of their own."""
        return get_schedule(self.options.schedule).splits_backward

    @property
    def tie_ranks(self) -> tuple[int, ...]:
        """On how many pipeline ranks the stages lie that hold each tied parameter."""
        ranks = self.options.rank_stages
        return tuple(sum(not set(mine).isdisjoint(stages) for mine in ranks) for _, stages in self.model.ties)

    @property
    def has_ties(self) -> bool:
        return self.is_pipeline and bool(self.model.ties)

    @property
    def has_fsdp(self) -> bool:
        return self.mesh.state_ranks > 1 and self.options.zero >= 2

    @property
    def has_shards(self) -> bool:
        """ZeRO-1: the optimizer has parts of the parameters."""
        return self.mesh.state_ranks > 1 and self.options.zero == 1

    @property
    def joins_states(self) -> bool:
        """Whether ZeRO splits states over several axes of the mesh together."""
        return (self.has_fsdp or self.has_shards) and self.mesh.state_axis not in self.mesh.sizes

    @property
    def joins_ranks(self) -> bool:
        """Whether gradients are added up, or states split, over several axes of the mesh together."""
        return self.joins_states or not {*self.reduced_axes} <= {*self.mesh.sizes}

    @property
    def has_dtensors(self) -> bool:
        """Whether the parameters that the optimizer updates are DTensors."""
        return bool(self.parameter_axes) or self.has_fsdp or self.has_shards

    @property
    def parameter_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that may split parameters, which are then DTensors on them."""
        return tuple(axis for axis in PARAMETER_AXES if self.mesh.sizes[axis] > 1)

    @cached_property
    def blocks(self) -> dict[int, str]:
        """Template index -> class name, for templates that are modules of their own."""
        taken: set[str] = set(CLASSES)
        names: dict[int, str] = {}
        for index, template in enumerate(self.graph.templates):
            if not template.is_module or not self.units_of(index):
                continue
            name = base = identifier(template.name, "Block")
            number = 2
            while name in taken:
                name, number = f"{base}{number}", number + 1
            taken.add(name)
            names[index] = name
        return names

    @cached_property
    def layers(self) -> Layers | None:
        """The numbered blocks that the stages share among them, if there is one such list."""
        if not self.is_pipeline:
            return None
        parents = dict.fromkeys(
            unit.fqn.rpartition(".")[0] for unit in self.graph.units if unit.template in self.blocks
        )
        found = [layers for parent in parents if parent and (layers := self._layers(parent)) is not None]
        return found[0] if len(found) == 1 else None

    def _layers(self, parent: str) -> Layers | None:
        prefix = f"{parent}."
        units = {i: unit for i, unit in enumerate(self.graph.units) if unit.fqn.startswith(prefix)}
        numbers = {i: unit.fqn[len(prefix) :] for i, unit in units.items()}
        if not all(number.isdecimal() and str(int(number)) == number for number in numbers.values()):
            return None
        templates = {unit.template for unit in units.values()}
        offsets = {i - int(number) for i, number in numbers.items()}
        held = {fqn for unit in units.values() for _, fqn in unit.tensors}
        others = [fqn for fqn in self.graph.tensors if fqn.startswith(prefix) and fqn not in held]
        if len(templates) > 1 or len(offsets) > 1 or others or any(map(self.counts_calls, templates)):
            return None
        ranges: list[tuple[int, int]] = []
        for stage in self.model.stages:
            runs = [run for run in stage.runs if run.units[0] in units]
            if len(runs) != 1 or not any(run.later for run in runs):
                return None
            inside = [int(numbers[unit]) for run in runs for unit in run.units]
            ranges.append((inside[0], inside[-1] + 1))
        return Layers(parent=parent, template=templates.pop(), ranges=tuple(ranges), offset=offsets.pop())

    def in_layers(self, unit: Unit) -> bool:
        return self.layers is not None and self.layers.holds(unit)

    def is_looped(self, run: Run) -> bool:
        return self.in_layers(self.graph.units[run.units[0]]) or len(run.units) > 1

    @cached_property
    def prelude_names(self) -> dict[Value, str]:
        template = self.graph.templates[self.graph.units[PRELUDE].template]
        names = value_names(template)
        nodes = template.of_kind(Kind.INPUT)
        input_names = {n.name: given.name for n, given in zip(nodes, self.graph.inputs, strict=True)}
        found: dict[Value, str] = {}
        for output, ref in enumerate(template.outputs):
            is_input = template.by_name[ref.node].kind is Kind.INPUT
            base = input_names[ref.node] if is_input else names[ref]
            name, number = base, 2
            while name in found.values():
                name, number = f"{base}_{number}", number + 1
            found[Value(PRELUDE, output)] = name
        return found

    def units_of(self, template: int) -> list[Unit]:
        return [unit for unit in self.graph.units[1:] if unit.template == template]

    def own(self, unit: Unit) -> dict[str, str]:
        """Tensors of a unit that live below its FQN: node name -> path relative to it."""
        prefix = f"{unit.fqn}."
        return {node: fqn[len(prefix) :] for node, fqn in unit.tensors if fqn.startswith(prefix)}

    def owned(self, template: int) -> dict[str, str]:
        """Tensors that every unit of a block's template holds itself; the others are passed to forward."""
        return self._owned[template]

    @cached_property
    def _owned(self) -> dict[int, dict[str, str]]:
        found: dict[int, dict[str, str]] = {}
        for unit in self.graph.units[1:]:
            own = self.own(unit)
            common = found.setdefault(unit.template, own).items()
            found[unit.template] = {node: path for node, path in common if own.get(node) == path}
        return found

    def passed(self, template: int) -> list[str]:
        """Parameters and buffers of a block that lie outside it, in node order."""
        owned = self.owned(template)
        tensors = self.graph.templates[template].nodes
        return [n.name for n in tensors if n.kind in (Kind.PARAMETER, Kind.BUFFER) and n.name not in owned]

    def outside(self, stage: StageProgram) -> dict[str, HeldTensor]:
        """Tensors of a stage that lie in none of its blocks."""
        inside = {
            fqn
            for unit in (self.graph.units[u] for u in range(stage.first, stage.last))
            if unit.template in self.blocks
            for node, fqn in unit.tensors
            if node in self.owned(unit.template)
        }
        return {tensor.fqn: tensor for tensor in stage.tensors if tensor.fqn not in inside}

    def uses_random(self, template: int) -> bool:
        return any(
            isinstance(arg, SeedRef)
            for step in self.program.templates[template].steps
            if isinstance(step, Compute)
            for arg in (*step.call.args, *(value for _, value in step.call.kwargs))
        )

    def counts_calls(self, template: int) -> bool:
        """Whether its calls are told their number: some module of it is called several times, and draws anew in each.

        Otherwise modules with random operations are built with theirs.
        """
        fqns = [unit.fqn for unit in self.units_of(template)]
        return self.uses_random(template) and len(set(fqns)) < len(fqns)

    def updates_statistics(self, template: int) -> bool:
        """Whether running a block changes its buffers, so that recomputing it must not.

        Raises:
            AutoparError: buffers that lie outside the block.
        """
        nodes = self.graph.templates[template]
        updated = {
            ref.node
            for node in nodes.of_kind(Kind.OP)
            if node.op in UPDATES_STATISTICS
            for ref in node.operands
            if nodes.by_name[ref.node].kind is Kind.BUFFER
        }
        if outside := updated - self.owned(template).keys():
            raise AutoparError(
                f"activation checkpointing would update the running statistics {min(outside)} twice: they lie outside "
                f"the block {nodes.pattern or nodes.name} that is recomputed",
                fix="plan with --activation-checkpoint none",
            )
        return bool(updated)

    @cached_property
    def checkpointing(self) -> Checkpointing:
        """What of the blocks the backward computes again."""
        by_block = self.options.checkpoint_by_block
        if not by_block:
            return self.options.activation_checkpoint
        return by_unit(self.graph, by_block, where="plan.json: checkpoint_by_block")

    @cached_property
    def kept_blocks(self) -> tuple[str, ...]:
        """Blocks that keep their gathered parameters from forward to backward, where others free them."""
        by_block = self.options.zero_by_block
        if not by_block or not self.has_fsdp:
            return ()
        zero = stages_by_unit(self.graph, by_block, where="plan.json: zero_by_block")
        units = enumerate(self.graph.units)
        names = (unit.fqn for index, unit in units if unit.template in self.blocks and stage_of(zero, index) == KEPT)
        return tuple(dict.fromkeys(names))

    def policy_of(self, unit: int) -> str:
        """What of a unit the backward computes again."""
        is_block = self.graph.units[unit].template in self.blocks
        return policy_of(self.checkpointing, unit) if is_block else "none"

    def policies(self, template: int) -> frozenset[str]:
        """The policies of a block's units."""
        units = enumerate(self.graph.units)
        return frozenset(self.policy_of(index) for index, unit in units if unit.template == template)

    def is_looked_up(self, run: Run) -> bool:
        """Whether blocks find out what their policy is when they run: a loop, in whatever stage, has several."""
        if not self.is_looped(run):
            return False
        is_shared = self.in_layers(self.graph.units[run.units[0]])
        found = self.policies(run.template) if is_shared else set(map(self.policy_of, run.units))
        return len(found) > 1

    @cached_property
    def looked_up(self) -> tuple[int, ...]:
        """The units whose policy is found out when they run."""
        runs = [run for stage in self.model.stages for run in stage.runs if run.template in self.blocks]
        return tuple(index for run in runs if self.is_looked_up(run) for index in run.units)

    @property
    def keeps_results(self) -> bool:
        """Whether blocks are checkpointed selectively."""
        return any("selective" in self.policies(template) for template in self.blocks)

    @cached_property
    def sparing_policies(self) -> tuple[str, ...]:
        """The policies of blocks that update running statistics, which they leave alone when they run again."""
        again = {template: self.policies(template) - {"none"} for template in self.blocks}
        found = [policies for template, policies in again.items() if policies and self.updates_statistics(template)]
        if self.spares_looked_up:
            found.append(frozenset(map(self.policy_of, self.looked_up)) - {"none"})
        return tuple(sorted(frozenset().union(*found)))

    @cached_property
    def spares_looked_up(self) -> bool:
        """Whether some block that finds out its policy updates running statistics."""
        return any(map(self.updates_statistics, {self.graph.units[index].template for index in self.looked_up}))

    def recomputed_call(self, inside: str, policy: str, *, updates: bool) -> str:
        """The call that runs a block so that the backward computes it again. `inside`: block and arguments."""
        if updates:
            keeps = f", keeps_results={policy == 'selective'}" if len(self.sparing_policies) > 1 else ""
            return f"recomputed({inside}{keeps})"
        contexts = ", context_fn=keep_results" if policy == "selective" else ""
        if self.splits_backward:
            return f"recomputed_once({inside}{contexts})"
        return f"checkpoint({inside}, use_reentrant=False, preserve_rng_state=False{contexts})"

    @property
    def kept_kernels(self) -> tuple[str, ...]:
        """The kernels whose results they keep, in order of first use."""
        operations = [node.op for template in self.blocks for node in self.graph.templates[template].of_kind(Kind.OP)]
        return tuple(dict.fromkeys(kernel for op in operations for kernel in kept_kernels(op)))

    @property
    def reduced_axes(self) -> tuple[str, ...]:
        """Axes over which `reduce_gradients` adds up partial gradients in a bucket; "dp_cp" for both at once."""
        return reduced_over(self.mesh, self.options.zero, [tensor.partial for tensor in self._with_gradients])

    @cached_property
    def _with_gradients(self) -> tuple[HeldTensor, ...]:
        """What a gradient reaches, of every stage; unused parameters have none."""
        used = {fqn for unit in self.graph.units for _, fqn in unit.tensors}
        held = (tensor for stage in self.model.stages for tensor in stage.tensors if tensor.fqn in used)
        return tuple(tensor for tensor in held if not tensor.is_buffer and tensor.type.requires_grad)

    def is_all_partial(self, axis: str) -> bool:
        """Whether every gradient is a partial sum on the axis."""
        return all(is_partial(tensor.partial, axis) for tensor in self._with_gradients)

    def num_dtypes(self, axis: str) -> int:
        """How many dtypes the gradients have that are partial sums on the axis."""
        held = [tensor for stage in self.model.stages for tensor in stage.tensors]
        return len({tensor.type.dtype for tensor in held if is_partial(tensor.partial, axis)})

    @property
    def updates_buffers(self) -> bool:
        return any(template.buffer_updates for template in self.graph.templates)


__all__ = ["RANDOM_OPERATIONS", "Layers", "Modules"]
