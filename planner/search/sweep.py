"""All choices together: the best plan over meshes, microbatches, placements, cuts and policies.

A candidate is a mesh with a number of microbatches. Placements are solved by the op-level program, slowest axis first
(dp, ep, cp, then tp), for one candidate of each kind; the others take them over where they may (`placing.py`). Whatever
may be fastest, by the seconds that its ranks are busy, is cut into stages and priced exactly under each policy. Then
candidates get a program of their own in the order of what is known of them: all that their lower bound leaves where
programs are small, the nearest ones where they are large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import inf, log10
from typing import NamedTuple

from ...cost_models.errors import AutoparError
from ..errors import CannotLower
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..sharding.program import Placements
from .answer import Candidate, Found, NothingFits, Setting, rank
from .batch import BatchSplit, find_batch_split
from .clashes import meshes_under
from .comparisons import Comparisons
from .exact import ExactSearch, Leaves, Proven
from .least_memory import states_of
from .mesh_bounds import WholeModel, bound_seconds, whole_model
from .placing import Placer
from .policies import zeros_for
from .prices import in_precision
from .pricing import Pricer, Way, best_of
from .rank_speeds import Devices, devices_of
from .refine import Refiner
from .space import Rules, Space
from .step_model import Policy
from .step_uses import Uses

Progress = Callable[[str], None]
# What memory costs, tried in turn where the quickest plan does not fit; times a step over the device's memory. The
# highest comes first: where nothing may fit under it, the others are not tried.
_MEMORY_PRICES = (10.0, 0.1, 1.0)
# Choices of all programs that are solved, as long as all are, and at most.
_FEW_CHOICES, _MANY_CHOICES = 1500, 9000
# Beyond the few, meshes are worth their own program that come so near to the best step or, slower, to the memory.
_NEAR_STEP, _NEAR_MEMORY = 1.02, 1.25
_FIRST_TRIES = 2  # of each kind of mesh, until something fits
_FAR = 0.8  # of the best step: what may be faster than this is priced before more kinds of meshes are listed


def search(setting: Setting, progress: Progress | None = None) -> Found:
    """The best plan.

    Raises:
        AutoparError: the pins allow no plan; they are named.
        NothingFits: no plan fits in memory.
    """
    return _Sweep(setting, progress or (lambda text: None)).run()


def some_plan(setting: Setting) -> Candidate | None:
    """A good plan, None where the sweep finds none that fits; nothing is proven and nothing compared with it.

    Raises:
        AutoparError: as `search`.
    """
    return _Sweep(setting, lambda text: None).some_plan()


class _Entry(NamedTuple):
    """A mesh under a labelling, whose units keep its ranks busy for `least_seconds` a step."""

    mesh: Mesh
    labelling: int
    least_seconds: float


# Whether the labelling is lean, seconds at least, position of the entry, and its policies once they are known.
_Queued = tuple[bool, float, int, tuple[Way, ...]]


@dataclass
class _Sweep:
    setting: Setting
    progress: Progress
    deadline: float = field(init=False)
    devices: Devices = field(init=False)
    space: Space = field(init=False)
    batch: BatchSplit = field(init=False)
    whole: WholeModel = field(init=False)
    found: list[Candidate] = field(default_factory=list, init=False)
    useless: dict[str, None] = field(default_factory=dict, init=False)
    best_seconds: float = field(default=inf, init=False)
    tried: set[tuple[Mesh, int]] = field(default_factory=set, init=False)  # with labellings
    roomy: set[Mesh] = field(default_factory=set, init=False)  # meshes on which the quickest placements fit
    leanest: dict[Mesh, int] = field(default_factory=dict, init=False)  # bytes under the leanest policy
    estimates: dict[Mesh, float] = field(default_factory=dict, init=False)  # seconds of the best labelling known
    solved: int = 0  # programs of the exact search

    def __post_init__(self) -> None:
        setting = self.setting
        limit = setting.time_limit_seconds
        self.deadline = inf if limit is None else time.monotonic() + limit
        self.space = Space(in_precision(setting.graph, setting.precision))
        self.batch = find_batch_split(self.space)
        self.devices = devices_of(
            self.space, setting.graph, setting.cluster, setting.stack, gpus=setting.gpus, slow_ranks=setting.slow_ranks
        )
        self.setting = setting = replace(setting, cluster=self.devices.cluster)
        self.whole = whole_model(self.space, setting.graph, setting.cluster, setting.stack)
        self.states = states_of(setting)
        self.pricer = Pricer(setting=setting, space=self.space, devices=self.devices)
        self.placer = Placer(
            space=self.space,
            batch=self.batch,
            rules=Rules(batch=self.batch.placements, tp_may_split_batch=setting.tp_may_split_batch),
            prices=self.pricer.prices,
            must_split=self._must_split,
            seconds_left=lambda: None if self.best_seconds == inf else self._seconds_left(),
        )

    # --- the outer loop ---

    def run(self) -> Found:
        setting = self.setting
        everything, bounds = self._listed()
        order = list(bounds)
        is_complete = self._sweep(order, bounds)
        refiner = Refiner(setting, self._leaves())
        if self.best_seconds == inf:
            self._keep(refiner.rescue(order, self.found))
        else:
            for better in tuple(refiner.better(min(self._fitting(), key=rank))):
                self._keep(better)
        proven = self._prove(order) if setting.exact else None
        if not self._fitting():
            self._add_leanest([mesh for mesh in everything if mesh not in bounds])
            self._refuse()
        others = Comparisons(
            setting=setting,
            pricer=self.pricer,
            placer=self.placer,
            solve=lambda mesh: self._solve(mesh, once=True),
            is_late=lambda: self._seconds_left() == 0,
        )
        others.complete(everything, self.found, min(self._fitting(), key=rank))
        baselines = tuple(others.baselines(everything, self.found))
        chosen = min(self._fitting(), key=rank)
        if proven is not None:
            lowest = max(proven.bound_seconds, min(bounds.values(), default=0.0))
            is_complete = proven.is_complete
        elif is_complete:
            lowest = refiner.bound(chosen, bounds)
        else:
            lowest = min(bounds.values(), default=0.0)
        return Found(
            best=chosen,
            runners_up=others.runners_up(self.found, chosen),
            baselines=baselines,
            bound_seconds=min(lowest, chosen.cost.step_seconds),
            considered=len(everything),
            solved=self.solved + self.placer.solved,
            is_complete=is_complete,
            batch=self.batch,
        )

    def some_plan(self) -> Candidate | None:
        """What the sweep alone finds."""
        _, bounds = self._listed()
        self._sweep(list(bounds), bounds)
        return min(self._fitting(), key=rank, default=None)

    def _listed(self) -> tuple[list[Mesh], dict[Mesh, float]]:
        """Every mesh, and the bounds of those on which the states may fit; the most promising first."""
        setting = self.setting
        bounds = {mesh: self._bound(mesh) for mesh in meshes_under(self.space, self.batch, setting.gpus, setting.pins)}
        everything = sorted(bounds, key=lambda mesh: (bounds[mesh], mesh.pp, mesh.tp, mesh.microbatches))
        room = setting.cluster.gpu.hbm_bytes
        return everything, {mesh: bounds[mesh] for mesh in everything if self._least_bytes(mesh) <= room}

    def _sweep(self, order: Sequence[Mesh], bounds: Mapping[Mesh, float]) -> bool:
        """Price what is worth it; whether the time was enough."""
        self._seed(order)
        self._scan(order, bounds, 0)
        open_meshes = dict.fromkeys(order)
        tried: set[object] = set()
        while open_meshes:
            if self._is_late():
                return False
            mesh = min(open_meshes, key=lambda mesh: (self.estimates.get(mesh, bounds[mesh]), bounds[mesh]))
            del open_meshes[mesh]
            if bounds[mesh] >= self.best_seconds:
                continue
            if self.placer.spent > _FEW_CHOICES:
                # Programs of this size are solved for the most promising meshes alone, once for equal local sizes.
                alike = (mesh.dp * mesh.microbatches, *(mesh.sizes[name] for name in SPLIT_AXES[1:]))
                if self.placer.spent > _MANY_CHOICES:
                    break
                if alike in tried or self.placer.is_solved(mesh) or not self._is_near(mesh):
                    continue
                tried.add(alike)
            known = len(self.placer.labellings)
            sizes = " ".join(f"{name}={size}" for name, size in mesh.written.items())
            self.progress(f"placing {sizes}, {mesh.microbatches} microbatches")
            self._add(self._solve(mesh))
            self._scan(order, bounds, known)
        return not self._is_late()

    def _is_near(self, mesh: Mesh) -> bool:
        """Whether an own labelling may well make this mesh the best."""
        if mesh not in self.leanest:
            return self.best_seconds == inf
        if self.leanest[mesh] > self.setting.cluster.gpu.hbm_bytes:
            return self.leanest[mesh] <= _NEAR_MEMORY * self.setting.cluster.gpu.hbm_bytes
        return self.estimates[mesh] <= _NEAR_STEP * self.best_seconds

    def _is_late(self) -> bool:
        return self.best_seconds < inf and self._seconds_left() == 0

    def _seconds_left(self) -> float | None:
        """Of the time limit, None without one."""
        return None if self.deadline == inf else max(0.0, self.deadline - time.monotonic())

    def _add(self, candidates: Sequence[Candidate]) -> None:
        for candidate in candidates:
            self.found.append(candidate)
            if candidate.fits and candidate.cost.is_simulated:
                self.best_seconds = min(self.best_seconds, candidate.cost.step_seconds)

    def _seed(self, order: Sequence[Mesh]) -> None:
        """Solve one mesh of each kind, the most promising first, so that others have something to take over."""
        kinds: set[object] = set()
        for mesh in order:
            kind = (mesh.dp > 1, *(mesh.sizes[name] for name in SPLIT_AXES[1:]))
            if kind in kinds or self._is_late() or self.placer.spent > _MANY_CHOICES:
                continue
            if next(self.placer.known(mesh), None) is None:
                found = self.placer.solve(mesh, 0.0)
                if isinstance(found, str):
                    self.useless[found] = None
            kinds.add(kind)

    def _scan(self, order: Sequence[Mesh], bounds: Mapping[Mesh, float], since: int) -> None:
        """Price meshes under the labellings from the `since`-th on, those first that may be fastest."""
        alike: dict[tuple[int, ...], list[Mesh]] = {}
        for mesh in order:
            if bounds[mesh] < self.best_seconds:
                inner = tuple(mesh.sizes[name] for name in SPLIT_AXES[1:])
                # Labellings that differ on dp alone are one where there is no dp.
                kind = (*inner, min(mesh.microbatches, 2), mesh.dp * mesh.microbatches, min(mesh.dp, 2))
                alike.setdefault(kind, []).append(mesh)
        entries: list[_Entry] = []
        queue: list[_Queued] = []
        slow: list[tuple[int, ...]] = []
        for kind in sorted(alike):
            # What is slow already gets no faster where it is split further.
            if any(all(a <= b for a, b in zip(other, kind, strict=True)) for other in slow):
                continue
            new = self._enter(alike[kind], since)
            if min((entry.least_seconds for entry in new), default=inf) >= self.best_seconds:
                slow.append(kind)
                continue
            for position, entry in enumerate(new):
                is_lean, seconds = entry.labelling in self.placer.lean, max(entry.least_seconds, bounds[entry.mesh])
                if self.best_seconds == inf and position % max(1, len(new) // _FIRST_TRIES) == 0:
                    self._try(entry, self._ways(entry))
                    continue
                heappush(queue, (is_lean, seconds, len(entries), ()))
                entries.append(entry)
            if self.best_seconds < inf:
                self._price_first(queue, entries, _FAR)
        # Labellings that spare memory come last: they are for meshes on which the quickest does not fit.
        self._price_first(queue, entries, 1.0)

    def _price_first(self, queue: list[_Queued], entries: Sequence[_Entry], factor: float) -> None:
        """Price what may take less than `factor` of the best step, the most promising first."""
        while queue and not self._is_late():
            if factor * self.best_seconds <= queue[0][1] < self.best_seconds:
                break
            is_lean, least, position, ways = heappop(queue)
            if least >= self.best_seconds:
                continue
            if ways:
                self.progress(f"pricing mesh {position + 1} of {len(entries)}")
                self._try(entries[position], ways)
            elif ways := self._ways(entries[position]):
                heappush(queue, (is_lean, min(way.fitting_seconds for way in ways), position, ways))

    def _enter(self, meshes: Sequence[Mesh], since: int) -> list[_Entry]:
        """Meshes of equal local sizes under the labellings they may take.

        Their ranks are busy equally long: with more stages fewer of them share the samples.
        """
        found: list[_Entry] = []
        for labelling in self.placer.known(meshes[0], since):
            try:
                least = self.pricer.evaluator(meshes[0], self.placer.taken(meshes[0], labelling)).least_seconds()
            except CannotLower:
                continue
            for mesh in meshes:
                self.estimates.setdefault(mesh, least)
                found.append(_Entry(mesh, labelling, least))
        return found

    def _ways(self, entry: _Entry) -> tuple[Way, ...]:
        """The policies of a mesh under what another one has found, each mesh and labelling once."""
        mesh, labelling = entry.mesh, entry.labelling
        if (mesh, labelling) in self.tried or not self.placer.may_take(mesh, labelling):
            return ()
        if labelling in self.placer.lean and mesh in self.roomy:
            return ()
        self.tried.add((mesh, labelling))
        try:
            return tuple(self.pricer.ways(mesh, self.placer.taken(mesh, labelling), self.best_seconds))
        except CannotLower:
            return ()

    def _try(self, entry: _Entry, ways: Sequence[Way]) -> None:
        """Price them; there are none where the placements cannot have the shares of the batch that are pinned."""
        if not ways:
            return
        mesh = entry.mesh
        every = self.pricer.priced_ways(mesh, ways, self.best_seconds)
        if not every.candidates:
            self.leanest.setdefault(mesh, min(int(way.floor_bytes) for way in ways))
            return
        priced = every.best
        leanest = min(candidate.cost.memory_bytes for candidate in every.candidates)
        self.leanest[mesh] = min(self.leanest.get(mesh, leanest), leanest)
        if priced[0].fits and entry.labelling not in self.placer.lean:
            self.roomy.add(mesh)
        if priced[0].fits:
            self.estimates[mesh] = min(self.estimates.get(mesh, inf), priced[0].cost.step_seconds)
        self._add(priced)

    def _prove(self, order: list[Mesh]) -> Proven:
        """Search all choices together, from the best plan that is known."""
        known = min(self._fitting(), key=rank, default=None)
        proven = ExactSearch(self.setting, self._leaves(), known).run(order)
        self.solved += proven.solved
        if proven.best is not None and proven.best is not known:
            self.found.append(proven.best)
        return proven

    def _leaves(self) -> Leaves:
        return Leaves(
            price=self._price_leaf,
            uses=lambda mesh: Uses(self.space, self.pricer.prices(mesh)),
            rules=self.placer.rules,
            fixed=self.placer.batch_labels,
            seconds_left=self._seconds_left,
        )

    def _fitting(self) -> list[Candidate]:
        return [candidate for candidate in self.found if candidate.fits and candidate.cost.is_simulated]

    def _keep(self, candidate: Candidate | None) -> None:
        if candidate is not None and candidate.fits:
            self._add([candidate])

    def _price_leaf(self, mesh: Mesh, placements: Placements, policy: Policy) -> Candidate | None:
        return self.pricer.leaf(mesh, placements, policy, self.best_seconds)

    def _bound(self, mesh: Mesh) -> float:
        setting = self.setting
        shards = max(zeros_for(mesh, setting.pins)) >= 1
        pipelines = self.pricer.pipelines(mesh)
        return bound_seconds(self.whole, mesh, setting.cluster, setting.optimizer, shards=shards, pipelines=pipelines)

    def _least_bytes(self, mesh: Mesh) -> float:
        return self.setting.cluster.gpu.overhead_bytes + self.states.least(mesh, self.setting.pins)

    def _refuse(self) -> None:
        if self.found:
            raise NothingFits(min(self.found, key=_shortfall), self.batch.obstacle)
        setting = self.setting
        what, *others = self.useless or {"no mesh can run this step": None}
        if setting.pins.is_uneven:
            fix = "leave batch-shares out: all dp ranks then take as much"
        elif setting.pins.mesh:
            fix = "; ".join(others) or "choose another mesh, or leave it to the search"
        else:
            what = f"no mesh of {setting.gpus} GPUs can run this step: {what}"
            fix = f"use fewer GPUs or more samples than {setting.graph.batch_size}"
        raise AutoparError(what, where=f"{setting.graph.name}, batch {setting.graph.batch_size}", fix=fix)

    def _add_leanest(self, hopeless: list[Mesh]) -> None:
        """Where no mesh has room for the states: the mesh that comes closest, to show what is missing."""
        for mesh in sorted(hopeless, key=lambda mesh: (self._least_bytes(mesh), -mesh.tp, mesh.pp, -mesh.microbatches)):
            if self.found:
                return
            self.found.extend(self._solve(mesh, once=True))

    def _must_split(self, mesh: Mesh, axis: str) -> bool:
        """Whether the axis is there for certain: pinned, or alone. Otherwise a mesh that wastes it is dropped."""
        return axis in self.setting.pins.mesh or mesh.sizes[axis] == self.setting.gpus

    # --- one candidate ---

    def _solve(self, mesh: Mesh, *, once: bool = False) -> tuple[Candidate, ...]:
        """The mesh under every policy, best first; what does not fit is kept as the answer to "why not"."""
        candidates: list[Candidate] = []
        prices = iter((0.0,))
        while (price := next(prices, None)) is not None:
            placements = self.placer.solve(mesh, price)
            if isinstance(placements, str):
                self.useless[placements] = None
                break
            if reason := self.pricer.why_not(mesh, placements):
                self.useless[reason] = None
                break
            new = self.pricer.priced(mesh, placements, inf if once else self.best_seconds)
            candidates.extend(new.candidates)
            # Once the quickest policy fits, memory is no longer what decides.
            if once or not (new.is_crowded or any(not candidate.fits for candidate in new.best)):
                break
            if not price:
                of_byte = self._seconds_per_byte(candidates)
                prices = iter(self._memory_prices(mesh, of_byte))
            elif not new.may_fit:
                break
        return best_of(candidates)

    def _memory_prices(self, mesh: Mesh, seconds_per_byte: float) -> Sequence[float]:
        """Prices of memory worth a try: none where the highest leaves the placements as they are, for then all do."""
        prices = [factor * seconds_per_byte for factor in _MEMORY_PRICES]
        return () if self.placer.solve(mesh, prices[0]) == self.placer.solve(mesh, 0.0) else prices

    def _seconds_per_byte(self, candidates: Sequence[Candidate]) -> float:
        """What the device's memory costs if all of it is worth a step, to a power of ten."""
        step = min((candidate.cost.step_seconds for candidate in candidates), default=self.best_seconds)
        return 10.0 ** round(log10(step / self.setting.cluster.gpu.hbm_bytes))


def _shortfall(candidate: Candidate) -> int:
    """Bytes that the fullest rank needs and does not have."""
    memory = zip(candidate.cost.rank_memory, candidate.hbm_bytes, strict=True)
    return max(each["total"] - room for each, room in memory)
