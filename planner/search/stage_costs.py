"""A lowered candidate -> seconds and bytes of each of its pipeline stages; equal stages are priced once.

Units are priced by `unit_costs.py`, what parameters take by `parameter_seconds.py`, memory by `stage_memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..blocks import is_block
from ..capture.graph import ModelGraph
from ..checkpointing import Checkpointing
from ..sharding.mesh import PARAMETER_AXES, SPLIT_AXES, Mesh
from ..sharding.placement import local_type
from ..sharding.program import ModelProgram
from ..zero import KEPT, Zero, highest
from .holdings import Holdings, stage_holdings
from .parameter_seconds import ParameterSeconds
from .prices import Prices
from .shared import DATA_AXES
from .stage_cost import PricedStage, StageCost, UnitSeconds, UnitSizes
from .stage_memory import StageMemory
from .step_collectives import prepared_changes
from .unit_bytes import UnitsBytes
from .unit_costs import Seconds, UnitCosts
from .unit_kinds import UnitKinds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """What of a stage is the same under every ZeRO stage. `prelude`: once a step."""

    forward: Seconds
    backward: Seconds
    weights: Seconds
    prelude: Seconds
    host_forward: float
    host_backward: float
    working_bytes: int


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Stages of one placement on one mesh. `master` has the dtypes that are stored."""

    program: ModelProgram
    master: ModelGraph
    prices: Prices
    kinds: UnitKinds
    keys: tuple[int, ...]  # of the templates, as `Shared` has them
    optimizer: str
    precision: str
    _stages: dict[tuple[int, Zero, int], PricedStage] = field(default_factory=dict, init=False)
    _states: dict[Zero, tuple[float, ...]] = field(default_factory=dict, init=False)
    _wholes: dict[tuple[Zero, Checkpointing], StageCost] = field(default_factory=dict, init=False)
    _sends: dict[tuple[object, ...], float] = field(default_factory=dict, init=False)

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    @cached_property
    def units(self) -> UnitCosts:
        return UnitCosts(program=self.program, prices=self.prices, kinds=self.kinds, keys=self.keys)

    @cached_property
    def bytes(self) -> UnitsBytes:
        return UnitsBytes(program=self.program, prices=self.prices, keys=self.keys)

    @cached_property
    def _parameters(self) -> ParameterSeconds:
        return ParameterSeconds(prices=self.prices, optimizer=self.optimizer)

    @cached_property
    def memory(self) -> StageMemory:
        return StageMemory(prices=self.prices, optimizer=self.optimizer, precision=self.precision)

    @cached_property
    def _master_program(self) -> ModelProgram:
        """The same program over the stored dtypes: read for parameters only, so nothing is lowered again."""
        pairs = zip(self.program.templates, self.master.templates, strict=True)
        templates = tuple(replace(lowered, template=template) for lowered, template in pairs)
        return replace(self.program, graph=self.master, templates=templates)

    @cached_property
    def _layouts(self) -> int:
        """How every template holds its tensors; dp does not show in their shapes."""
        axes = tuple(axis for axis in self.mesh.axes if axis.name not in DATA_AXES)
        return self.prices.shared.number((axes, tuple(lowered.tensors for lowered in self.program.templates)))

    @cached_property
    def local(self) -> int:
        """Equal where units cost the same: on whatever pipeline, however ZeRO shards."""
        return self.prices.shared.number((self.keys, self.mesh.dp, self.mesh.microbatches))

    def held(self, first: int, last: int, *, stored: bool = False) -> Holdings:
        """The parameters of a stage in the dtypes that run, or in those that are stored."""
        known = self.prices.shared.costs
        key = ("held", self.kinds, stored, self._layouts, self.kinds.stage(first, last, ""))
        if key not in known:
            program = self._master_program if stored else self.program
            known[key] = stage_holdings(program, first, last, self.kinds.sharing)
        return known[key]

    def _both_held(self, first: int, last: int, zero: Zero) -> tuple[Holdings, Holdings]:
        """In the dtypes that run and in those that are stored."""
        if isinstance(zero, int):
            return self.held(first, last), self.held(first, last, stored=True)
        units = range(max(first, 1), last)
        kept = frozenset(index for index in units if zero[index] == KEPT and is_block(self.program.graph, index))
        programs = self.program, self._master_program
        held, stored = (stage_holdings(program, first, last, self.kinds.sharing, kept) for program in programs)
        return held, stored

    def priced(self, first: int, last: int, zero: Zero, recompute: Checkpointing, waited: int = 0) -> PricedStage:
        """Units [first, last) as a stage. `recompute`: as `UnitCosts.unit`. `waited`: as
        `ParameterSeconds.data_parallel`."""
        kind = self.kinds.stage(first, last, recompute)
        key = (kind, zero if isinstance(zero, int) else zero[max(first, 1) : last], waited)
        if key not in self._stages:
            passes = self._passes(first, last, recompute, kind)
            held, stored = self._both_held(first, last, zero)
            self._stages[key] = PricedStage(
                cost=self._cost(held, stored, highest(zero), passes, waited),
                still=self.memory.without_activations(passes.working_bytes, held, stored, highest(zero)),
                saved_bytes=self.saved_bytes(first, last, recompute),
                remade_bytes=self.saved_bytes(first, last, recompute, is_remade=True),
            )
        return self._stages[key]

    def saved_bytes(self, first: int, last: int, recompute: Checkpointing, *, is_remade: bool = False) -> int:
        """What autograd keeps of one microbatch in a stage, before or after all blocks have run again."""
        if recompute == "none":
            is_remade = False
        kind = self.kinds.stage(first, last, recompute)
        known, key = self.prices.shared.costs, ("saved", self.kinds, self.local, kind, is_remade)
        if key not in known:
            known[key] = self.bytes.stage_saved_bytes(first, last, recompute=recompute, is_remade=is_remade)
        return known[key]

    def _passes(self, first: int, last: int, recompute: Checkpointing, kind: int) -> _Passes:
        known, key = self.prices.shared.costs, ("passes", self.kinds, self.local, kind)
        if key in known:
            return known[key]
        forward, backward, weights = Seconds(), Seconds(), Seconds()
        host_forward = host_backward = 0.0
        mine = range(max(first, 1), last)
        kinds = self.kinds.counted(mine, recompute)
        for unit, count in self.units.counted(mine, recompute=recompute):
            forward, backward = forward + unit.forward * count, backward + unit.backward * count
            weights += unit.weights * count
            host_forward += unit.host_forward * count
            host_backward += unit.host_backward * count
        prelude = self.units.template(self.kinds.templates[0], recompute="none").forward
        prelude += self.units.changes_seconds(prepared_changes(self.program, first, last))[0]
        found = _Passes(
            forward=forward,
            backward=backward,
            weights=weights,
            prelude=prelude,
            host_forward=host_forward,
            host_backward=host_backward,
            working_bytes=max(
                (self.bytes.unit(index, recompute=policy).working_bytes for index, policy in kinds), default=0
            ),
        )
        known[key] = found
        return found

    def _cost(self, held: Holdings, stored: Holdings, zero: int, passes: _Passes, waited: int = 0) -> StageCost:
        copied_ahead, copied_back = self._parameters.fsdp_copies(held, zero)
        forward = passes.forward + Seconds(compute=copied_ahead)
        accumulated = Seconds(compute=self._parameters.accumulation(held, zero) + copied_back)
        backward, weights = passes.backward + accumulated, passes.weights + accumulated
        prelude = passes.prelude
        step = {
            "compute": prelude.compute + self.prices.cluster.gpu.host.step_seconds,
            "dp": prelude.dp,
            "optimizer": self._parameters.optimizer_step(held, stored, zero),
        }
        for axis in SPLIT_AXES[1:]:
            summed = self._parameters.partial_gradients(axis, held, zero) if axis in PARAMETER_AXES else 0.0
            step[axis] = prelude.on_axis(axis) + summed
        # Whether the ranks are on dp or cp: they hold the same parameters.
        step["dp"] += self._parameters.data_parallel(held, zero, forward.compute, backward.compute, waited)
        return StageCost(
            forward=forward,
            backward=backward,
            weights=weights,
            step=step,
            send_seconds=0.0,
            memory_bytes={},
            num_parameters=stored.num_elements,
            host_forward=passes.host_forward,
            host_backward=passes.host_backward,
        )

    # --- by unit, for the cut ---

    def unit_seconds(self, recompute: Checkpointing) -> UnitSeconds:
        """What every unit but the prelude takes in one microbatch."""
        if not isinstance(recompute, str):
            of = {policy: zip(*self.unit_seconds(policy), strict=True) for policy in {*recompute}}
            by_policy = {policy: tuple(pairs) for policy, pairs in of.items()}
            chosen = (by_policy[policy][unit] for unit, policy in enumerate(recompute[1:]))
            return UnitSeconds(*zip(*chosen, strict=True))
        known, key = self.prices.shared.costs, ("unit seconds", self.kinds, self.local, recompute)
        if key not in known:
            units = [self.units.unit(index, recompute=recompute) for index in range(1, len(self.kinds.templates))]
            through = tuple(unit.forward.total + unit.backward.total for unit in units)
            known[key] = UnitSeconds(through, tuple(unit.forward.total for unit in units))
        return known[key]

    def unit_sizes(self, recompute: Checkpointing) -> UnitSizes:
        """What every unit but the prelude keeps of one microbatch."""
        known, key = self.prices.shared.costs, ("unit sizes", self.kinds, self.local, recompute)
        if key not in known:
            units = [self.bytes.unit(index, recompute=recompute) for index in range(1, len(self.kinds.templates))]
            known[key] = UnitSizes(
                kept=tuple(float(unit.kept.num_bytes) for unit in units),
                remade=tuple(float(unit.remade.num_bytes) for unit in units),
                working_bytes=max(unit.working_bytes for unit in units),
            )
        return known[key]

    @cached_property
    def cut_seconds(self) -> tuple[float, ...]:
        """Messages of one microbatch, there and back, over a cut behind every unit but the prelude."""
        return tuple(2 * self.send_seconds(index + 1, 0) for index in range(1, len(self.kinds.templates)))

    def states(self, zero: Zero) -> tuple[float, ...]:
        """Parameters, gradients and optimizer state of every unit but the prelude."""
        if not isinstance(zero, int):
            return tuple(self.states(stage)[index] for index, stage in enumerate(zero[1:]))
        if zero not in self._states:
            found = self._by_template(lambda index: self._unit_states(index, zero))
            shared = {index: self._unit_states(index, zero) for index in self.kinds.sharing if index}
            self._states[zero] = tuple(shared.get(index, size) for index, size in enumerate(found, start=1))
        return self._states[zero]

    def _by_template(self, of_unit: Callable[[int], float]) -> Iterator[float]:
        """A number for every unit but the prelude, worked out for one of each template; 0 where units share tensors."""
        known: dict[int, float] = {}
        for index, template in enumerate(self.kinds.templates[1:], start=1):
            if index not in self.kinds.sharing and template not in known:
                known[template] = of_unit(index)
            yield 0.0 if index in self.kinds.sharing else known[template]

    def _unit_states(self, index: int, zero: int) -> float:
        stored, held = self.held(index, index + 1, stored=True), self.held(index, index + 1)
        parts = self.memory.of_rank([self.memory.without_activations(0, held, stored, zero)], 0)
        return float(parts["total"] - parts["overhead"])

    # --- what no cut does without ---

    def whole(self, zero: Zero, recompute: Checkpointing) -> StageCost:
        """The whole model as one stage: whatever the cut, the stages' passes add up to at least its own."""
        if (zero, recompute) not in self._wholes:
            last = len(self.kinds.templates)
            passes = self._passes(0, last, recompute, self.kinds.stage(0, last, recompute))
            held, stored = self._both_held(0, last, zero)
            self._wholes[zero, recompute] = self._cost(held, stored, highest(zero), passes)
        return self._wholes[zero, recompute]

    # --- messages ---

    def send_seconds(self, boundary: int, edge: int) -> float:
        """Messages of one microbatch before unit `boundary`, from pipeline stage `edge` to the next."""
        if boundary >= len(self.kinds.templates):
            return 0.0
        made = self.kinds.sent[boundary]
        edge = self.prices.alike_edge(edge)
        if (made, edge) not in self._sends:
            self._sends[made, edge] = sum(self._sent(template, output, edge) for template, output in made)
        return self._sends[made, edge]

    def _sent(self, template: int, output: int, edge: int) -> float:
        lowered = self.program.templates[template]
        kind = lowered.template.type_of(lowered.template.outputs[output])
        size = local_type(kind, lowered.outputs[output].layout, self.mesh.axes).num_bytes
        pair = lowered.outputs[output].layout.get("tp")
        is_whole = pair is None or not pair.is_split
        if self.prices.stack.pipeline_messages == "scattered" and is_whole:
            gathered = self.prices.use_seconds("tp", "all_gather", size)
            return self.prices.send_seconds(size // self.mesh.tp, edge) + gathered
        return self.prices.send_seconds(size, edge)
