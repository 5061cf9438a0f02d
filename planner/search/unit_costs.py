"""A lowered program -> seconds of every unit in one microbatch, whole or run again before its backward.

What it keeps is in `unit_bytes.py`: most of what is timed is too slow for anyone to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...cost_models.communication import overlapped_seconds
from ...cost_models.compute import device_seconds, host_seconds
from ..capture.graph import ModelGraph
from ..checkpointing import Checkpointing, policy_of
from ..sharding.mesh import Mesh
from ..sharding.program import Compute, Convert, ModelProgram, TemplateProgram, Var
from ..sharding.redistribute import Change
from .host_seconds import conversion_host, operation_host, parameters_host
from .kernels import stack_works
from .prices import Prices, overlap_slowdown
from .run_again import NONE, SELECTIVE, keeps_result, runs_again
from .split_backward import trained_operands
from .unit_kinds import UnitKinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """One direction of a unit in one microbatch: what computes, and collectives by axis."""

    compute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    dp: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.tp + self.cp + self.ep + self.dp

    def on_axis(self, name: str) -> float:
        """Of the collectives on an axis."""
        return {"dp": self.dp, "ep": self.ep, "cp": self.cp, "tp": self.tp}[name]

    def __mul__(self, factor: float) -> Seconds:
        return Seconds(
            compute=factor * self.compute,
            tp=factor * self.tp,
            cp=factor * self.cp,
            ep=factor * self.ep,
            dp=factor * self.dp,
        )

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            compute=self.compute + other.compute,
            tp=self.tp + other.tp,
            cp=self.cp + other.cp,
            ep=self.ep + other.ep,
            dp=self.dp + other.dp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """A unit in one microbatch.

    `weights`: the part of the backward that makes gradients of parameters. `host_forward`, `host_backward`: seconds of
    the host, which `forward` and `backward` include where they are longer than the device's.
    """

    forward: Seconds
    backward: Seconds
    weights: Seconds
    host_forward: float
    host_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepCost:
    """One operation or conversion of a template."""

    forward: Seconds
    backward: Seconds
    host_forward: float = 0.0
    host_backward: float = 0.0
    weights_fraction: float = 0.0  # of the backward's compute


def _messages_only(step: _StepCost) -> _StepCost:
    """Run again where its result is kept: the kernel is left out, collectives around it are not."""
    return replace(step, forward=replace(step.forward, compute=0.0), host_forward=0.0)


def _total(steps: Sequence[_StepCost], *, forward: bool) -> Seconds:
    """One direction of a run of steps: the longer of device and host."""
    total = Seconds()
    host = 0.0
    for step in steps:
        total += step.forward if forward else step.backward
        host += step.host_forward if forward else step.host_backward
    return replace(total, compute=max(total.compute, host))


def _weights(steps: Sequence[_StepCost]) -> Seconds:
    """The part of a backward that makes gradients of parameters, of the longer of device and host."""
    device = sum(step.weights_fraction * step.backward.compute for step in steps)
    host = sum(step.weights_fraction * step.host_backward for step in steps)
    is_device = sum(step.backward.compute for step in steps) >= sum(step.host_backward for step in steps)
    return Seconds(compute=device if is_device else host)


def _whole(steps: Sequence[_StepCost]) -> UnitCost:
    """A unit of which nothing runs again."""
    return UnitCost(
        forward=_total(steps, forward=True),
        backward=_total(steps, forward=False),
        weights=_weights(steps),
        host_forward=sum(step.host_forward for step in steps),
        host_backward=sum(step.host_backward for step in steps),
    )


def _weights_fractions(lowered: TemplateProgram) -> dict[tuple[Var, ...], float]:
    """By the results of an operation: how much of its backward makes gradients of weights.

    Each operand with a gradient counts alike: exact for products, where it matters.
    """
    return {step.results: mine / trained for step, mine, trained in trained_operands(lowered)}


@dataclass(frozen=True, kw_only=True)
class UnitCosts:
    """Costs of the units of one program. Each template and kind of edge is priced once."""

    program: ModelProgram
    prices: Prices
    kinds: UnitKinds
    keys: tuple[int, ...]  # of the templates, as `Shared` has them
    _edges: dict[tuple[int, int, int, int], tuple[Seconds, Seconds]] = field(default_factory=dict, init=False)
    _units: dict[tuple[int, str], UnitCost] = field(default_factory=dict, init=False)

    @property
    def graph(self) -> ModelGraph:
        return self.program.graph

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    def unit(self, index: int, *, recompute: Checkpointing) -> UnitCost:
        """`recompute`: one of RECOMPUTE for all blocks, or for each unit."""
        policy = policy_of(recompute, index)
        key = (self.kinds.alike[index], policy)
        if key not in self._units:
            unit = self.graph.units[index]
            cost = self.template(unit.template, recompute=policy)
            forward, backward = cost.forward, cost.backward
            for position in range(len(unit.inputs)):
                ahead, back = self._edge(index, position)
                forward, backward = forward + ahead, backward + back
            self._units[key] = replace(cost, forward=forward, backward=backward)
        return self._units[key]

    def counted(self, units: range, *, recompute: Checkpointing) -> Iterator[tuple[UnitCost, int]]:
        """The costs of some units, equal ones once, and how many of each there are."""
        for (index, policy), count in self.kinds.counted(units, recompute).items():
            yield self.unit(index, recompute=policy), count

    def _edge(self, index: int, position: int) -> tuple[Seconds, Seconds]:
        """Conversions at an input."""
        unit = self.graph.units[index]
        value = unit.inputs[position]
        key = (self.graph.units[value.unit].template, value.output, unit.template, position)
        if key not in self._edges:
            self._edges[key] = self.changes_seconds(self.program.in_microbatch(index, position))
        return self._edges[key]

    def changes_seconds(self, steps: Sequence[Change]) -> tuple[Seconds, Seconds]:
        """Forward and backward of conversions."""
        forward, backward = Seconds(), Seconds()
        for step in steps:
            axis = self.mesh.axis(step.axis)
            if axis.is_time:
                continue
            ahead, back = self.prices.uses_seconds(step.collectives(axis))
            copy_ahead, copy_back = self.prices.copies(step)
            host_ahead, host_back = conversion_host(step, self.prices.cluster.gpu)
            forward += _on_axis(step.axis, ahead) + Seconds(compute=copy_ahead + host_ahead)
            backward += _on_axis(step.axis, back) + Seconds(compute=copy_back + host_back)
        return forward, backward

    def template(self, index: int, *, recompute: str) -> UnitCost:
        """A unit of a template without its edges."""
        lowered = self.program.templates[index]
        policy = recompute if lowered.template.is_module else NONE
        known = self.prices.shared.costs
        key = ("template", self.keys[index], policy)
        if key not in known:
            by_step = ("steps", self.keys[index])
            if by_step not in known:
                known[by_step] = self._step_costs(lowered)
            known[key] = _whole(known[by_step]) if policy == NONE else self._recomputed(index, policy, known[by_step])
        return known[key]

    def _recomputed(self, index: int, policy: str, steps: Sequence[_StepCost]) -> UnitCost:
        """Checkpointing: part of the forward runs again before the backward."""
        plain = self.template(index, recompute=NONE)
        lowered = self.program.templates[index]
        again = runs_again(lowered, policy, self.prices)
        if policy == SELECTIVE:
            pairs = zip(steps, lowered.steps, strict=False)
            steps = [*(_messages_only(cost) if keeps_result(step) else cost for cost, step in pairs), steps[-1]]
        # Parameters, the last entry, are read again with whatever is run again.
        repeated = [step for step, runs in zip(steps, [*again, True], strict=True) if runs]
        forward = _total(repeated, forward=True)
        forward += Seconds(compute=self.prices.cluster.gpu.host.checkpoint_seconds)
        return UnitCost(
            forward=plain.forward,
            backward=plain.backward + forward,
            weights=plain.weights,
            host_forward=plain.host_forward,
            host_backward=plain.host_backward + sum(step.host_forward for step in repeated),
        )

    def _step_costs(self, lowered: TemplateProgram) -> list[_StepCost]:
        gpu, stack = self.prices.cluster.gpu, self.prices.stack
        # Fused traffic is left out below: what remains runs as eager kernels do.
        priced = replace(stack, fusion="eager")
        found: list[_StepCost] = []
        fractions = _weights_fractions(lowered)
        for step, work in zip(lowered.steps, stack_works(lowered, stack), strict=True):
            if isinstance(step, Convert) or work is None:
                assert isinstance(step, Convert)
                ahead, back = self.changes_seconds((step.change,))
                found.append(_StepCost(forward=ahead, backward=back))
                continue
            forward = Seconds(compute=device_seconds(work.forward, gpu, dtype=work.dtype, stack=priced))
            backward = Seconds(
                compute=device_seconds(work.backward, gpu, dtype=work.dtype, stack=priced, is_backward=True)
            )
            host_ahead, host_back = operation_host(step, work, gpu)
            if gpu.is_host:
                forward, backward = forward + Seconds(compute=host_ahead), backward + Seconds(compute=host_back)
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
                    host_forward=host_seconds(work.forward, gpu, stack=priced) + host_ahead,
                    host_backward=host_seconds(work.backward, gpu, stack=priced) + host_back,
                    weights_fraction=fractions.get(step.results, 0.0),
                )
            )
        if stack.tp_overlap == "weight gradients":
            found = self._hidden_behind_weights(lowered, found)
        ahead, back = parameters_host(lowered, self.mesh, gpu)
        reads = _StepCost(forward=Seconds(), backward=Seconds(), host_forward=ahead, host_backward=back)
        if gpu.is_host:
            reads = replace(reads, forward=Seconds(compute=ahead), backward=Seconds(compute=back))
        return [*found, reads]

    def _hidden_behind_weights(self, lowered: TemplateProgram, steps: Sequence[_StepCost]) -> list[_StepCost]:
        """With the backward collectives on tp beside the weight gradients of the products that read their values."""
        slowdown = overlap_slowdown(self.prices.stack)
        found = list(steps)
        for index, step in enumerate(lowered.steps):
            seconds = steps[index].backward.tp
            if not isinstance(step, Convert) or not seconds:
                continue
            beside = sum(
                cost.weights_fraction * cost.backward.compute
                for cost, reader in zip(steps, lowered.steps, strict=True)
                if isinstance(reader, Compute) and step.target in reader.operands
            )
            shown = overlapped_seconds(beside, seconds, slowdown=slowdown) - beside
            found[index] = replace(steps[index], backward=replace(steps[index].backward, tp=shown))
        return found


def _on_axis(axis: str, seconds: float) -> Seconds:
    return Seconds(**{axis: seconds})
