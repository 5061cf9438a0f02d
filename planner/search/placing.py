"""A mesh -> placements: solved by the op-level program, slowest axis first, or taken over from another mesh.

What is best on one mesh is mostly best on others, and whether it is legal there is quickly known. So every answer of
the program is kept as a labelling, which any mesh with the same kinds of axes may take; the program itself runs for few
of them (`sweep.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ..capture.graph import Kind
from ..sharding.mesh import MICROBATCH, SPLIT_AXES, Mesh
from ..sharding.program import Placements
from ..sharding.rules import Option
from .assignment import NoAssignment, Stopped
from .batch import BatchSplit
from .placements_ilp import solve
from .prices import Prices
from .problem import Built, build_problem, empty_placements
from .space import Rules, Space
from .step_uses import splits

# Prices of memory where latency makes it cheapest to split nothing: an axis that is there must split something.
_SPLITTING_PRICES = (1e-11, 1e-10, 1e-9, 1e-8, 1e-6)
# Choices of all programs so far, above which the axes outside the last one keep the labels that are known.
_LARGE = 1500


@dataclass
class Placer:
    """Placements of one model. `must_split`: whether an axis of a mesh is there for certain, whatever it costs.
    `seconds_left`: what a program may take, None without a limit."""

    space: Space
    batch: BatchSplit
    rules: Rules
    prices: Callable[[Mesh], Prices]
    must_split: Callable[[Mesh, str], bool]
    seconds_left: Callable[[], float | None]
    solved: int = 0  # programs
    spent: int = 0  # choices of all of them
    labellings: list[Placements] = field(default_factory=list)  # without the microbatch axis
    lean: set[int] = field(default_factory=set)  # those labellings that only a price of memory has given

    def __post_init__(self) -> None:
        self._solutions: dict[tuple[Mesh, float], Placements | str] = {}
        self._axes: dict[tuple[Mesh, str, float, int], Placements | str] = {}
        self._last: Mesh | None = None
        self._programs: dict[tuple[Mesh, str, int], Built] = {}
        self._taken: dict[tuple[int, tuple[str, ...]], Placements] = {}
        self._legal: dict[tuple[int, Mesh], bool] = {}
        self._options: dict[tuple[int, str], dict[str, Option]] = {}
        self._batch_labels = self._as_batch()

    # --- solved ---

    def solve(self, mesh: Mesh, seconds_per_byte: float) -> Placements | str:
        """Placements of one stage's ranks and microbatches, or why the mesh makes no sense."""
        alone = replace(mesh, pp=1)
        key = (alone, seconds_per_byte)
        if key not in self._solutions:
            if alone != self._last:
                self._last, self._programs = alone, {}
            self._solutions[key] = found = self._place(alone, seconds_per_byte)
            if not isinstance(found, str):
                self._remember(found, is_lean=seconds_per_byte > 0)
        return self._solutions[key]

    def is_solved(self, mesh: Mesh) -> bool:
        return (replace(mesh, pp=1), 0.0) in self._solutions

    def _place(self, mesh: Mesh, seconds_per_byte: float) -> Placements | str:
        placements = self.batch_labels(mesh)
        part = replace(mesh, **dict.fromkeys(SPLIT_AXES, 1))
        names = [name for name in SPLIT_AXES if mesh.sizes[name] > 1]
        for name in names:
            part = replace(part, **{name: mesh.sizes[name]})
            known = self._known_large(part) if name != names[-1] else None
            solved = known or self._axis(part, placements, name, seconds_per_byte)
            for price in _SPLITTING_PRICES if self.must_split(mesh, name) else ():
                if isinstance(solved, str) or self._splits_something(solved, name):
                    break
                if price > seconds_per_byte:
                    solved = self._axis(part, placements, name, price)
            if isinstance(solved, str):
                return solved
            if not self._splits_something(solved, name):
                return f"{name}={mesh.sizes[name]} splits nothing: {self._obstacles(mesh.sizes[name])}"
            placements = solved
        return placements

    def _known_large(self, mesh: Mesh) -> Placements | None:
        """What another mesh has decided already, where deciding again takes long."""
        if self.spent < _LARGE:
            return None
        return next((self.taken(mesh, index) for index in self.known(mesh)), None)

    def _axis(self, mesh: Mesh, fixed: Placements, name: str, seconds_per_byte: float) -> Placements | str:
        key = (mesh, name, seconds_per_byte, id(fixed))  # what is fixed is kept here or in `_batch_labels`
        if key not in self._axes:
            self._axes[key] = self._solve_axis(mesh, fixed, name, seconds_per_byte)
        return self._axes[key]

    def _solve_axis(self, mesh: Mesh, fixed: Placements, name: str, seconds_per_byte: float) -> Placements | str:
        built = self._program(mesh, fixed, name)
        self.spent += sum(map(len, built.problem.choices))
        try:
            assignment = solve(built.problem, seconds_per_byte=seconds_per_byte, time_limit_seconds=self.seconds_left())
        except Stopped:
            return f"{name}={mesh.sizes[name]} has no placements yet: the time was up"
        except NoAssignment as stuck:
            where = f": stuck at {stuck.vertex}" if stuck.vertex else ""
            return f"{name}={mesh.sizes[name]} has no placements{where}"
        self.solved += 1
        return built.placements(self.space, assignment)

    def _program(self, mesh: Mesh, fixed: Placements, name: str) -> Built:
        """The program of an axis, the same at every price of memory: those of the last mesh are kept."""
        key = (mesh, name, id(fixed))
        if key not in self._programs:
            self._programs[key] = build_problem(
                self.space, mesh.axes, (name,), fixed, self.rules, self.prices(mesh), mesh.microbatches
            )
        return self._programs[key]

    def batch_labels(self, mesh: Mesh) -> Placements:
        """What the microbatch axis splits, which is given."""
        return self._batch_labels if mesh.microbatches > 1 else empty_placements(self.space.graph)

    def _as_batch(self) -> Placements:
        if self.batch.placements is None:
            return empty_placements(self.space.graph)
        named = self.batch.placements
        return tuple({name: {MICROBATCH: labels[MICROBATCH]} for name, labels in p.items()} for p in named)

    # --- taken over ---

    def _remember(self, placements: Placements, *, is_lean: bool) -> None:
        plain = tuple(
            {name: rest for name, labels in placement.items() if (rest := _without(labels, MICROBATCH))}
            for placement in placements
        )
        if plain not in self.labellings:
            self.labellings.append(plain)
            if is_lean:
                self.lean.add(len(self.labellings) - 1)
        elif not is_lean:
            self.lean.discard(self.labellings.index(plain))

    def known(self, mesh: Mesh, since: int = 0) -> Iterator[int]:
        """Labellings that other meshes have found and this one may take, from the `since`-th on, each once."""
        seen: list[Placements] = []
        for index in range(since, len(self.labellings)):
            taken = self.taken(mesh, index)
            if taken not in seen and self.may_take(mesh, index):
                seen.append(taken)
                yield index

    def may_take(self, mesh: Mesh, index: int) -> bool:
        """Whether every axis splits something under a labelling, and every factor that is split divides."""
        key = (index, replace(mesh, pp=1))
        if key not in self._legal:
            self._legal[key] = self._is_legal(self.taken(mesh, index), mesh)
        return self._legal[key]

    def taken(self, mesh: Mesh, index: int) -> Placements:
        """A labelling on the axes of a mesh."""
        return self._taking(index, tuple(axis.name for axis in mesh.axes))

    def _taking(self, index: int, names: tuple[str, ...]) -> Placements:
        """A labelling on the axes that are there."""
        if (index, names) not in self._taken:
            batch = self._batch_labels if MICROBATCH in names else empty_placements(self.space.graph)
            found = []
            for own, given in zip(self.labellings[index], batch, strict=True):
                labels = {
                    name: {a: x for a, x in {**given.get(name, {}), **own.get(name, {})}.items() if a in names}
                    for name in dict.fromkeys((*given, *own))
                }
                found.append({name: of_axes for name, of_axes in labels.items() if of_axes})
            self._taken[index, names] = tuple(found)
        return self._taken[index, names]

    def _is_legal(self, placements: Placements, mesh: Mesh) -> bool:
        names = [axis.name for axis in mesh.axes if not axis.is_time]
        if not all(self._splits_something(placements, name) for name in names):
            return False
        return all(
            self._divides(t, name, labels, mesh)
            for t, placement in enumerate(placements)
            for name, labels in placement.items()
            if self.space.graph.templates[t].by_name[name].kind is Kind.OP
        )

    def _divides(self, template: int, name: str, labels: Mapping[str, str], mesh: Mesh) -> bool:
        sizes: dict[str, list[int]] = {}
        for axis in mesh.axes:
            sizes.setdefault(labels.get(axis.name, "none"), []).append(axis.size)
        for label, taken in sizes.items():
            option = self._option(template, name, label)
            together = 1
            for size in taken:
                together *= size
            if option is not None and ((option.extent and option.extent % together) or (option.one_axis and taken[1:])):
                return False
        return True

    def _option(self, template: int, name: str, label: str) -> Option | None:
        if (template, name) not in self._options:
            self._options[template, name] = {o.label: o for o in reversed(self.space.options[template, name])}
        return self._options[template, name].get(label)

    # --- words ---

    def _splits_something(self, placements: Placements, axis: str) -> bool:
        for t, template in enumerate(self.space.graph.templates):
            if t == self.space.prelude:
                continue
            for name, labels in placements[t].items():
                if splits(labels.get(axis, "none")) and template.by_name[name].kind is Kind.OP:
                    return True
        return False

    def _obstacles(self, size: int) -> str:
        """The nearest obstacles: operations whose factors the axis does not divide."""
        found: dict[str, None] = {}
        for (t, name), options in self.space.options.items():
            if t == self.space.prelude:
                continue
            template = self.space.graph.templates[t]
            sizes = sorted({o.extent for o in options if o.extent > 1 and o.extent % size}, reverse=True)
            if sizes and any(p.output.requires_grad for p in template.of_kind(Kind.PARAMETER)):
                where = f"{template.pattern}.{name}" if template.pattern else f"{template.name}.{name}"
                found[f"{' or '.join(map(str, sizes[:3]))} at {where}"] = None
        return "; ".join(list(found)[:4]) or "no operation has a factor to split"


def _without(labels: Mapping[str, str], axis: str) -> dict[str, str]:
    return {name: label for name, label in labels.items() if name != axis}
