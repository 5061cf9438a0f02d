"""A lowered unit -> the memory that autograd keeps of it; units of a stage -> the same, shared memory counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..capture.graph import Value
from ..sharding.program import Compute, Convert, ModelProgram, TemplateProgram, Var
from ..sharding.rules.registry import Saved
from .kernels import kept_by_kernels
from .prices import Prices, saved_on_device
from .step_collectives import PRELUDE_UNIT
from .storages import Storages, storages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What autograd keeps of one unit in one microbatch.

    Memory that other units may keep as well goes by the position of the input that has it, or by ~position of the first
    output that shows it.

    values: such memory and its bytes.
    handed: the same of inputs without gradient. Most are the prelude's, there for all microbatches: `num_bytes` leaves
    them out.
    own_bytes: all other memory, with masks, statistics and copies that are no value of the program.
    outputs: memory and bytes of the unit's outputs, kept or not.
    """

    values: tuple[tuple[int, int], ...]
    handed: tuple[tuple[int, int], ...]
    own_bytes: int
    outputs: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.values) + self.own_bytes


@dataclass(frozen=True)
class KeptTemplate:
    """What units of one template keep, whole or with a part that runs again."""

    lowered: TemplateProgram
    prices: Prices

    @cached_property
    def storages(self) -> Storages:
        again = self.prices.stack.gathered_inputs == "gathered again"
        return storages_of(self.lowered, self.prices.mesh.axes, gathers_again=again)

    def kept(self, without: Sequence[bool] = (), there: Sequence[Compute] = ()) -> Kept:
        """Every step but those that run `without` keeping anything; what `there` steps have made is counted already."""
        lowered, storages = self.lowered, self.storages
        held = {*lowered.tensors, *(made for step in there for made in step.results)}
        done = {id(step) for step in there}
        values: dict[Var, int] = {}
        extra = 0
        for index, step in enumerate(lowered.steps):
            if isinstance(step, Convert) or not any(value.requires_grad for value in step.outputs):
                continue
            if without and without[index]:
                continue
            saved = self._saved(step)
            if id(step) in done:
                extra += saved.extra_bytes - saved.kernel_bytes
            else:
                extra += saved.extra_bytes + kept_by_kernels(step.node, step.operand_types, self.prices.stack)
            kept = [step.operands[i] for i in saved.operands] + [step.results[i] for i in saved.outputs]
            for i, apart in saved.flattened:
                if not storages.tensors[step.operands[i]].is_flat(apart):
                    extra += step.operand_types[i].num_bytes
                    kept.remove(step.operands[i])
            for root in map(storages.root, kept):
                if root not in held:
                    values[root] = storages.num_bytes[root]
        return self._kept(values, extra)

    def _saved(self, step: Compute) -> Saved:
        return saved_on_device(step.node, step.operand_types, step.outputs, step.call, self.prices.kernels)

    def inputs(self, results: Sequence[Compute] = ()) -> Kept:
        """What is kept of a unit that runs again: its inputs, and what some kernels have made, statistics included."""
        made_again = [self.storages.root(made) for step in results for made in step.results]
        values = {made: self.storages.num_bytes[made] for made in (*self.lowered.inputs, *made_again)}
        extra = sum(self._saved(step).kernel_bytes for step in results)
        return self._kept(values, extra)

    def _kept(self, values: Mapping[Var, int], extra_bytes: int) -> Kept:
        roots = [self.storages.root(made) for made in self.lowered.outputs]
        memory = {made: position for position, made in enumerate(self.lowered.inputs)}
        for position, root in enumerate(roots):
            memory.setdefault(root, ~position)
        shared: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for root, size in values.items():
            if root in memory:
                is_handed = memory[root] >= 0 and not self.lowered.template.type_of(root.ref).requires_grad
                shared[is_handed].append((memory[root], size))
        return Kept(
            values=tuple(shared[False]),
            handed=tuple(shared[True]),
            own_bytes=sum(size for root, size in values.items() if root not in memory) + extra_bytes,
            outputs=tuple((memory[root], self.storages.num_bytes[root]) for root in roots),
        )


def stage_bytes(
    program: ModelProgram, units: range, kept_of: Callable[[int], Kept], is_view: Callable[[int, int], bool]
) -> int:
    """Bytes that a stage keeps of one microbatch: memory that several units keep counts once.

    `is_view(unit, input)`: whether the conversions at an input leave the memory as it is.
    """
    sizes: dict[_Place, int] = {}
    own = 0
    for values, own_bytes in _kept_places(program, units, kept_of, is_view):
        for place, whole, size in values:
            sizes[place] = max(size, whole, sizes.get(place, 0))
        own += own_bytes
    return sum(sizes.values()) + own


def first_kept_bytes(
    program: ModelProgram,
    units: range,
    ways: Sequence[Callable[[int], Kept]],
    is_view: Callable[[int, int], bool],
) -> tuple[tuple[int, ...], ...]:
    """For each way to run units, of each unit the bytes of what no unit before it keeps in any of the ways.

    No stage keeps less than its units have here, each in a way of its own.
    """
    seen: set[_Place] = set()
    found: list[list[int]] = [[] for _ in ways]
    for each in zip(*(_kept_places(program, units, kept_of, is_view) for kept_of in ways), strict=True):
        for sizes, (values, own_bytes) in zip(found, each, strict=True):
            sizes.append(own_bytes + sum(size for place, _, size in values if place not in seen))
        seen.update(place for values, _ in each for place, _, _ in values)
    return tuple(map(tuple, found))


# Where memory lies: a unit and what it calls it (`Kept`), or a unit outside the stage and its output.
_Place = tuple[int, int]


def _kept_places(
    program: ModelProgram, units: range, kept_of: Callable[[int], Kept], is_view: Callable[[int, int], bool]
) -> Iterator[tuple[list[tuple[_Place, int, int]], int]]:
    """By unit (place, bytes as its maker has it, bytes kept) of memory that others may keep, and bytes of all other.

    The maker's bytes are 0 where that is the unit itself or lies outside. What the prelude has made is left out.
    """
    made: dict[_Place, tuple[_Place, int]] = {}  # by unit and output
    for index in units:
        kept, inputs = kept_of(index), program.graph.units[index].inputs

        def place(memory: int, index: int = index, inputs: tuple[Value, ...] = inputs) -> tuple[_Place, int]:
            if memory < 0 or not is_view(index, memory):
                return (index, memory), 0
            source = inputs[memory].unit, inputs[memory].output
            return made.get(source, (source, 0))

        values = [(*place(memory), size) for memory, size in kept.values]
        handed = [(*place(memory), size) for memory, size in kept.handed]
        yield [*values, *(each for each in handed if each[0][0] != PRELUDE_UNIT)], kept.own_bytes
        for output, (memory, size) in enumerate(kept.outputs):
            where, whole = place(memory)
            made[index, output] = where, max(whole, size)
