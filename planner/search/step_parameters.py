"""Columns of a step -> what the parameters of a stage take: bytes, accumulation, gradients, optimizer, from below.

For parameters p of a stage s, after its last microbatch:

    A_s >= gradients over dp, ep, cp and tp + O_s,  O_s >= optimizer on the device, O_s >= on the host
    D_s >= gather and reduction of an FSDP group, each group           nothing hides the largest

Prices of messages grow slower than their size, so a sum of sizes is priced by the chord to the largest it can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ...cost_models.optimizer import optimizer_seconds
from ..capture.graph import ITEM_BYTES, Kind, ModelGraph
from ..sharding.mesh import PARAMETER_AXES, SPLIT_AXES
from ..sharding.placement import SUMMED_GRADIENT
from .assignment import Choice
from .held_parameters import HeldParameter, held_dims, held_shape, padded_bytes
from .host_seconds import holds_dtensors
from .linear import Linear, add, scaled, sum_of
from .prices import Prices, accumulated_bytes, gathered_bytes
from .problem import state_of
from .step_columns import SCALE, StepColumns
from .step_uses import layout_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Parameters of a stage, each once: (vertex, template, node) and how many there are of it."""

    counts: Mapping[tuple[int, int, str], int]
    groups: tuple[tuple[tuple[int, int, str], ...], ...]  # distinct FSDP groups


class StepParameters:
    """`zero` None: any ZeRO stage. `master` has the dtypes that are stored."""

    def __init__(
        self, columns: StepColumns, master: ModelGraph, prices: Prices, *, zero: int | None, optimizer: str
    ) -> None:
        self.columns, self.space, self.built = columns, columns.space, columns.built
        self.master, self.prices = master, prices
        self.mesh, self.cluster = prices.mesh, prices.cluster
        self.zero, self.optimizer = zero, optimizer

    def of_stage(self, first: int, last: int) -> StageParameters:
        """Parameters of units [first, last)."""
        graph = self.space.graph
        counts: Counter[tuple[int, int, str]] = Counter()
        groups: dict[tuple[tuple[int, int, str], ...], None] = {}
        seen: set[str] = set()
        by_group: dict[str, list[tuple[int, int, str]]] = {}
        for index in range(max(first, 1), last):
            unit = graph.units[index]
            template = graph.templates[unit.template]
            for name, fqn in unit.tensors:
                if template.by_name[name].kind is not Kind.PARAMETER or fqn in seen:
                    continue
                seen.add(fqn)
                key = (self.columns.vertex[unit.template, name], unit.template, name)
                counts[key] += 1
                by_group.setdefault(unit.fqn if template.is_module else "", []).append(key)
        for members in by_group.values():
            groups.setdefault(tuple(members))
        return StageParameters(counts=counts, groups=tuple(groups))

    def after(self, parameters: StageParameters) -> tuple[Linear, Linear]:
        """(accumulation in each microbatch, gradients and optimizer once a step), at least."""
        mesh, price, stack, gpu = self.mesh, self.prices.use_seconds, self.prices.stack, self.cluster.gpu
        shards = self._shards()
        accumulation: Linear = {}
        if mesh.microbatches > 1 and not (shards > 1 and stack.accumulation == "sharded"):
            traffic = self.total(
                parameters,
                lambda p: (
                    float(prod(p.shape) * accumulated_bytes(p.dtype, stack, mesh.state_ranks)) if p.trainable else 0.0
                ),
                master=False,
            )
            accumulation = scaled(traffic, SCALE / (gpu.hbm_bytes_per_second * gpu.hbm_fraction))
        once: Linear = {}
        if self.zero is None:
            pass  # some stage may hide what others show
        elif mesh.state_ranks > 1 and self.zero == 1 and stack.gradient_sync == "exposed":
            axis, ranks = mesh.state_axis, mesh.state_ranks
            cut = self.total(
                parameters, lambda p: 0.0 if p.dp_dim(1) is None else padded_of(p, ranks, zero=1), master=False
            )
            trained = self.total(
                parameters, lambda p: padded_of(p, ranks, zero=1) if p.trainable else 0.0, master=False
            )
            add(once, self.columns.chord(cut, lambda size: price(axis, "all_gather", size)))
            add(once, self.columns.chord(trained, lambda size: price(axis, "reduce_scatter", size)))
        elif mesh.state_ranks > 1 and self.zero == 0 and stack.gradient_sync == "exposed":
            axis = mesh.state_axis
            trained = self.total(parameters, lambda p: size_of(p) if p.trainable else 0.0, master=False)
            add(once, self.columns.chord(trained, lambda size: price(axis, "all_reduce", size)))
        elif self.zero >= 2 and mesh.state_ranks > 1:
            add(once, self.columns.largest("D", [self._exposed(members) for members in parameters.groups]))
        if mesh.state_ranks > 1 and self.zero in (0, 1) and stack.gradient_buffers == "copied to":
            add(once, self._buffer_copies(parameters, self.zero))
        for axis in PARAMETER_AXES:
            if mesh.sizes[axis] > 1:
                partial = self.total(
                    parameters, lambda p, axis=axis: size_of(p) if axis in p.partial else 0.0, master=False
                )
                add(
                    once,
                    self.columns.chord(partial, lambda size, axis=axis: price(axis, "all_reduce", size // shards)),
                )
        stored = self.total(parameters, lambda p: size_of(p) if p.trainable else 0.0, master=True)
        probe = 1 << 30
        rate = optimizer_seconds(probe, gpu, optimizer=self.optimizer) / probe
        device = add(scaled(stored, rate / self._updating() * SCALE), {None: -rate * SCALE})
        launched = optimizer_seconds(
            0,
            gpu,
            optimizer=self.optimizer,
            num_tensors=self._num_tensors(parameters),
            sharded=holds_dtensors(mesh, self.zero or 0),
        )
        add(once, self.columns.largest("O", (device, {None: launched * SCALE})))
        return accumulation, once

    def _buffer_copies(self, parameters: StageParameters, zero: int) -> Linear:
        """Copies to and from what is exchanged over dp, as `ParameterSeconds` has them, without their launches."""
        gpu, gathered = self.cluster.gpu, 1 + 1 / self.mesh.state_ranks

        def moved(held: HeldParameter) -> float:
            size = size_of(held)
            reduced = size * (1 if zero else 2) if held.trainable else 0.0
            return reduced + (gathered * size if zero and held.dp_dim(1) is not None else 0.0)

        seconds_per_byte = 2 / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
        return scaled(self.total(parameters, moved, master=False), seconds_per_byte * SCALE)

    def _exposed(self, members: Sequence[tuple[int, int, str]]) -> Linear:
        """Gather and reduction of one FSDP group, which nothing hides if it is the largest."""
        shards = self.mesh.shards

        def both(size: int) -> float:
            price = self.prices.use_seconds
            summed = price("dp_replicate", "all_reduce", size // shards)
            gathered = price("dp_shard", "all_gather", gathered_bytes(size, self.prices.stack))
            return gathered + price("dp_shard", "reduce_scatter", size) + summed

        def padded(held: HeldParameter) -> float:
            return float(padded_bytes(held, shards)) if held.trainable else 0.0

        if len(members) == 1:
            return self._bytes(members[0], lambda held: both(int(padded(held))) * SCALE, master=False)
        return self.columns.chord(sum_of([(self._bytes(key, padded, master=False), 1.0) for key in members]), both)

    def _num_tensors(self, parameters: StageParameters) -> int:
        graph = self.space.graph
        return sum(
            count
            for (_, t, name), count in parameters.counts.items()
            if graph.templates[t].by_name[name].output.requires_grad
        )  # fmt: skip

    def _shards(self) -> int:
        """Ranks that share parameters and gradients, at most."""
        return self.mesh.shards if self.zero is None or self.zero >= 2 else 1

    def _updating(self) -> int:
        """Ranks that share the optimizer's work, at most."""
        return self.mesh.shards if self.zero is None or self.zero >= 1 else 1

    def optimizer_share(self, parameters: StageParameters) -> Linear:
        """Seconds of the optimizer on the fullest of the stages, at least."""
        shards = self._updating()
        probe = 1 << 30
        rate = optimizer_seconds(probe, self.cluster.gpu, optimizer=self.optimizer) / probe
        stored = self.total(parameters, lambda p: size_of(p) if p.trainable else 0.0, master=True)
        return scaled(stored, rate * SCALE / shards / self.mesh.pp)

    def _held(self, key: tuple[int, int, str], choice: Choice, master: bool) -> HeldParameter:
        _, t, name = key
        graph = self.master if master else self.space.graph
        node = graph.templates[t].by_name[name]
        layout = layout_of(state_of(choice.outputs[0]), self.built.axes)
        partial = frozenset(a for a in SPLIT_AXES if layout.get(a) == SUMMED_GRADIENT and node.output.requires_grad)
        return HeldParameter(
            fqn=name,
            shape=held_shape(node.output, layout, self.mesh),
            dtype=node.output.dtype,
            trainable=node.output.requires_grad,
            partial=partial,
            group="",
            split_dims=held_dims(layout),
        )

    def _bytes(self, key: tuple[int, int, str], amount: Callable[[HeldParameter], float], *, master: bool) -> Linear:
        return self.columns.chosen(key[0], lambda choice: amount(self._held(key, choice, master)))

    def trained(self, key: tuple[int, int, str]) -> Linear:
        """Bytes of one parameter as it is stored, 0 where it is frozen."""
        return self._bytes(key, lambda held: size_of(held) if held.trainable else 0.0, master=True)

    def total(self, parameters: StageParameters, amount: Callable[[HeldParameter], float], *, master: bool) -> Linear:
        """The sum of an amount over the parameters of a stage."""
        return sum_of([(self._bytes(key, amount, master=master), count) for key, count in parameters.counts.items()])


def size_of(held: HeldParameter) -> float:
    """Bytes of a parameter on one rank, before dp shards it."""
    return float(prod(held.shape) * ITEM_BYTES[held.dtype])


def padded_of(held: HeldParameter, dp: int, zero: int = 2) -> float:
    """The same, padded to equal shards over dp."""
    return float(padded_bytes(held, dp, zero))
