"""What a stage holds of parameters, equal ones counted: a few kinds of blocks, many times each.

Seconds and bytes of parameters are sums over groups of equal ones, so their cost does not grow with depth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from ..sharding.program import ModelProgram
from .held_parameters import HeldParameter, held_of, padded_bytes, parameter_bytes, parameters_of, unused_parameters

Counted = tuple[tuple[HeldParameter, int], ...]  # parameters without FQN and group, and how many of each


@dataclass(frozen=True, eq=False)
class Holdings:
    """`groups`: the parameters that ZeRO exchanges together, and how many such groups there are. `root`: the one of
    them that lies outside the blocks. `kept`: those of blocks under ZeRO-2, where others are under ZeRO-3."""

    groups: tuple[tuple[Counted, int], ...]
    root: Counted = ()
    kept: tuple[tuple[Counted, int], ...] = ()
    _sizes: dict[tuple[int, int, bool], tuple[tuple[int, int], ...]] = field(default_factory=dict, init=False)

    @staticmethod
    def of(held: Iterable[HeldParameter]) -> Holdings:
        """Fold a list of parameters."""
        by_group: dict[str, Counter[HeldParameter]] = {}
        for parameter in held:
            by_group.setdefault(parameter.group, Counter())[_alike(parameter)] += 1
        root = tuple(by_group[""].items()) if "" in by_group else ()
        return _folded(((tuple(members.items()), 1) for members in by_group.values()), root)

    @cached_property
    def parameters(self) -> Counted:
        """All of them, whatever their group."""
        counts: Counter[HeldParameter] = Counter()
        for members, times in self.groups:
            for parameter, count in members:
                counts[parameter] += times * count
        return tuple(counts.items())

    @cached_property
    def trained(self) -> Counted:
        """Those that a gradient reaches."""
        return tuple((parameter, count) for parameter, count in self.parameters if parameter.trainable)

    @cached_property
    def num_groups(self) -> int:
        return sum(times for _, times in self.groups)

    @cached_property
    def num_parameters(self) -> int:
        return sum(count for _, count in self.parameters)

    @cached_property
    def num_trained(self) -> int:
        return sum(count for _, count in self.trained)

    @cached_property
    def num_bytes(self) -> int:
        """On one rank, before dp shards them."""
        return sum(count * parameter_bytes(parameter) for parameter, count in self.parameters)

    @cached_property
    def trained_bytes(self) -> int:
        return sum(count * parameter_bytes(parameter) for parameter, count in self.trained)

    @property
    def trained_dtype(self) -> str:
        """Of the first of them, as all are exchanged."""
        return self.trained[0][0].dtype

    @cached_property
    def kept_bytes(self) -> int:
        """Of blocks under ZeRO-2 where others are under ZeRO-3, on one rank before dp shards them."""
        return sum(times * count * parameter_bytes(p) for members, times in self.kept for p, count in members)

    @cached_property
    def freed(self) -> Holdings:
        """What is not `kept`."""
        counts = Counter(dict(self.groups)) - Counter(dict(self.kept))
        return Holdings(groups=tuple(counts.items()), root=self.root) if self.kept else self

    @cached_property
    def num_elements(self) -> int:
        return sum(count * num_elements(parameter) for parameter, count in self.parameters)

    def group_bytes(self, dp: int, zero: int = 2, *, trained: bool = False) -> tuple[tuple[int, int], ...]:
        """(bytes, how many) of the groups that ZeRO exchanges at once, padded to equal shards over dp.

        `trained`: of what has gradients alone; groups without any are left out.
        """
        key = (dp, zero, trained)
        if key not in self._sizes:
            self._sizes[key] = tuple(_padded(self.groups, dp, zero, trained=trained))
        return self._sizes[key]

    def kept_group_bytes(self, dp: int) -> tuple[tuple[int, int], ...]:
        """The same of `kept`."""
        return tuple(_padded(self.kept, dp, 2, trained=False))

    def root_bytes(self, dp: int) -> int:
        """The same of what lies outside the blocks; 0 where there are no blocks."""
        return sum(size for size, _ in _padded([(self.root, 1)], dp, 2, trained=False)) if self.num_groups > 1 else 0

    def block_bytes(self, dp: int) -> tuple[tuple[int, int], ...]:
        """(bytes, how many) of the groups that are blocks, or of all where there are none."""
        root = self.root_bytes(dp)
        return self.group_bytes(dp) if not root else (*self.group_bytes(dp), (root, -1))

    def largest_block_bytes(self, dp: int) -> int:
        """The same of the largest of these groups."""
        counts: Counter[int] = Counter()
        for size, count in self.block_bytes(dp):
            counts[size] += count
        return max((size for size, count in counts.items() if count > 0), default=0)

    def cut_bytes(self, dp: int) -> tuple[tuple[int, int], ...]:
        """The same under ZeRO-1 of what dp can split, which is gathered."""
        cut = [(tuple((p, n) for p, n in members if p.dp_dim(1) is not None), times) for members, times in self.groups]
        return tuple(_padded(cut, dp, 1, trained=False))


def _padded(groups: Iterable[tuple[Counted, int]], dp: int, zero: int, *, trained: bool) -> Iterator[tuple[int, int]]:
    for members, times in groups:
        chosen = [(parameter, count) for parameter, count in members if parameter.trainable or not trained]
        if chosen:
            yield sum(count * padded_bytes(parameter, dp, zero) for parameter, count in chosen), times


def _alike(parameter: HeldParameter) -> HeldParameter:
    return replace(parameter, fqn="", group="")


def _folded(groups: Iterable[tuple[Counted, int]], root: Counted) -> Holdings:
    """Equal groups counted together."""
    counts: Counter[Counted] = Counter()
    for members, times in groups:
        counts[members] += times
    return Holdings(groups=tuple(counts.items()), root=root)


def stage_holdings(
    program: ModelProgram, first: int, last: int, sharing: frozenset[int], kept: frozenset[int] = frozenset()
) -> Holdings:
    """`Holdings.of(held_parameters(program, first, last))`, without going through equal units one by one.

    `sharing`: the units that hold a tensor which another unit holds too. `kept`: those under ZeRO-2 where others are
    under ZeRO-3.
    """
    graph = program.graph
    templates = Counter(
        graph.units[index].template for index in range(max(first, 1), last) if index not in sharing
    )  # fmt: skip
    apart = held_of(program, sorted(index for index in sharing if max(first, 1) <= index < last))
    if first <= 1:
        apart.update(unused_parameters(program))
    root: Counter[HeldParameter] = Counter()
    by_group: dict[str, Counter[HeldParameter]] = {}
    for parameter in apart.values():
        members = by_group.setdefault(parameter.group, Counter()) if parameter.group else root
        members[_alike(parameter)] += 1
    groups: list[tuple[Counted, int]] = [(tuple(members.items()), 1) for members in by_group.values()]
    for template, times in templates.items():
        members = Counter(parameter for _, parameter in parameters_of(program, template))
        if graph.templates[template].is_module:
            groups.append((tuple(members.items()), times))
        else:
            for parameter, count in members.items():
                root[parameter] += times * count
    outside = tuple(root.items())
    found = _folded(((members, times) for members, times in (*groups, (outside, 1)) if members), outside)
    if not kept:
        return found
    names = {graph.units[index].fqn for index in kept}
    alike = Counter(graph.units[index].template for index in kept if index not in sharing)
    whole = [(tuple(members.items()), 1) for fqn, members in by_group.items() if fqn in names]
    whole += [
        (tuple(Counter(parameter for _, parameter in parameters_of(program, template)).items()), times)
        for template, times in alike.items()
    ]
    return replace(found, kept=_folded(((members, times) for members, times in whole if members), ()).groups)


def num_elements(parameter: HeldParameter) -> int:
    """Elements on one rank, before dp shards them."""
    return prod(parameter.shape)


__all__ = ["Counted", "Holdings", "num_elements", "stage_holdings"]
