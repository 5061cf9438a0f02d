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
from math import inf, log10

from ...cost_models.errors import AutoparError
from ..errors import CannotLower
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..sharding.program import Placements
from ..zero import FREED, highest
from .answer import Candidate, Found, NothingFits, Setting, rank
from .batch import BatchSplit, find_batch_split
from .clashes import meshes_under
from .comparisons import Comparisons
from .exact import ExactSearch, Leaves, Proven
from .labelled_meshes import LabelledMeshes
from .least_memory import states_of
from .mesh_bounds import WholeModel, bound_seconds, whole_model
from .placing import Placer
from .policies import zeros_for
from .prices import in_precision
from .pricing import Pricer, best_of
from .rank_speeds import Devices, devices_of
from .record import Record
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
_MOST_FRUITLESS = 2  # kinds of inner axes whose own programs bring no better plan, one after the other


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


@dataclass
class _Sweep:
    setting: Setting
    progress: Progress
    devices: Devices = field(init=False)
    space: Space = field(init=False)
    batch: BatchSplit = field(init=False)
    whole: WholeModel = field(init=False)
    useless: dict[str, None] = field(default_factory=dict, init=False)
    solved: int = 0  # programs of the exact search

    def __post_init__(self) -> None:
        setting = self.setting
        limit = setting.time_limit_seconds
        self.record = Record(inf if limit is None else time.monotonic() + limit)
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
            seconds_left=lambda: None if self.record.best_seconds == inf else self.record.seconds_left,
        )
        self.labelled = LabelledMeshes(self.pricer, self.placer, self.record, self.progress)

    # --- the outer loop ---

    def run(self) -> Found:
        setting = self.setting
        everything, bounds = self._listed()
        order = list(bounds)
        is_complete = self._sweep(order, bounds)
        refiner = Refiner(setting, self._leaves())
        if self.record.best_seconds == inf:
            self._keep(refiner.rescue(order, self.record.found))
        else:
            for better in tuple(refiner.better(min(self.record.fitting, key=rank))):
                self._keep(better)
        proven = self._prove(order) if setting.exact else None
        if not self.record.fitting:
            self._add_leanest([mesh for mesh in everything if mesh not in bounds])
            self._refuse()
        others = Comparisons(
            setting=setting,
            pricer=self.pricer,
            placer=self.placer,
            solve=lambda mesh: self._solve(mesh, once=True),
            price=self._priced_as_known,
            is_late=lambda: self.record.seconds_left == 0,
        )
        others.complete(everything, self.record.found, min(self.record.fitting, key=rank))
        baselines = tuple(others.baselines(everything, self.record.found))
        chosen = min(self.record.fitting, key=rank)
        if proven is not None:
            lowest = max(proven.bound_seconds, min(bounds.values(), default=0.0))
            is_complete = proven.is_complete
        elif is_complete:
            lowest = refiner.bound(chosen, bounds)
        else:
            lowest = min(bounds.values(), default=0.0)
        return Found(
            best=chosen,
            runners_up=others.runners_up(self.record.found, chosen),
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
        return min(self.record.fitting, key=rank, default=None)

    def _listed(self) -> tuple[list[Mesh], dict[Mesh, float]]:
        """Every mesh, and the bounds of those on which the states may fit; the most promising first."""
        setting = self.setting
        bounds = {mesh: self._bound(mesh) for mesh in meshes_under(self.space, self.batch, setting.gpus, setting.pins)}
        everything = sorted(bounds, key=lambda mesh: (bounds[mesh], mesh.pp, mesh.tp, mesh.microbatches))
        room = setting.cluster.gpu.hbm_bytes
        return everything, {mesh: bounds[mesh] for mesh in everything if self._least_bytes(mesh) <= room}

    def _sweep(self, order: Sequence[Mesh], bounds: Mapping[Mesh, float]) -> bool:
        """Price what is worth it; whether the time was enough."""
        whole = [mesh for mesh in order if mesh.cp == 1 or "cp" in self.setting.pins.mesh]
        self._seed(whole)
        self.labelled.add(whole, bounds)
        parts = self._split_samples([mesh for mesh in order if mesh.cp > 1 and "cp" not in self.setting.pins.mesh])
        known = len(self.placer.labellings)
        self._seed(parts)
        if self._is_memory_short():
            price = _MEMORY_PRICES[0] * self._seconds_per_byte(())
            self._seed([*self._of_best(whole), *parts], price)
            self.labelled.add(whole, bounds, known)
        self.labelled.add(parts, bounds)
        self.labelled.finish()
        order = [*whole, *parts]
        open_meshes = dict.fromkeys(order)
        tried: set[object] = set()
        fruitless: set[tuple[int, ...]] = set()  # sizes of inner axes whose own programs have brought nothing
        while open_meshes:
            if self.record.is_late:
                return False
            mesh = min(open_meshes, key=lambda mesh: (self.labelled.estimates.get(mesh, bounds[mesh]), bounds[mesh]))
            del open_meshes[mesh]
            if bounds[mesh] >= self.record.best_seconds:
                continue
            inner = tuple(mesh.sizes[name] for name in SPLIT_AXES[1:])
            if self.placer.spent > _FEW_CHOICES:
                # Programs of this size are solved for the most promising meshes alone, once for equal local sizes, and
                # as long as they bring something: whatever they find, others are priced under it.
                alike = (mesh.dp * mesh.microbatches, *inner)
                if self.placer.spent > _MANY_CHOICES:
                    break
                if len(fruitless) >= _MOST_FRUITLESS:
                    break
                if inner in fruitless or alike in tried or self.placer.is_solved(mesh) or not self._is_near(mesh):
                    continue
                tried.add(alike)
            known, best = len(self.placer.labellings), self.record.best_seconds
            sizes = " ".join(f"{name}={size}" for name, size in mesh.written.items())
            self.progress(f"placing {sizes}, {mesh.microbatches} microbatches")
            self.record.add(self._solve(mesh))
            self.labelled.add(order, bounds, known)
            self.labelled.finish()
            if self.record.best_seconds < best:
                fruitless.clear()
            elif best < inf:
                fruitless.add(inner)
        return not self.record.is_late

    def _is_near(self, mesh: Mesh) -> bool:
        """Whether an own labelling may well make this mesh the best."""
        if mesh not in self.labelled.leanest:
            return self.record.best_seconds == inf
        if self.labelled.leanest[mesh] > self.setting.cluster.gpu.hbm_bytes:
            return self.labelled.leanest[mesh] <= _NEAR_MEMORY * self.setting.cluster.gpu.hbm_bytes
        return self.labelled.estimates[mesh] <= _NEAR_STEP * self.record.best_seconds

    def _is_memory_short(self) -> bool:
        """Whether the best plan known takes longer for lack of memory."""
        best = min(self.record.fitting, key=rank, default=None)
        return best is not None and (best.activation_checkpoint != "none" or highest(best.zero) == FREED)

    def _of_best(self, order: Sequence[Mesh]) -> list[Mesh]:
        """The mesh of the best plan known."""
        best = min(self.record.fitting, key=rank, default=None)
        return [] if best is None or best.outer not in order else [best.outer]

    def _seed(self, order: Sequence[Mesh], seconds_per_byte: float = 0.0) -> None:
        """Solve one mesh of each kind, the most promising first, so that others have something to take over."""
        kinds: dict[tuple[int, ...], dict[bool, Mesh]] = {}
        for mesh in order:
            kinds.setdefault(tuple(mesh.sizes[name] for name in SPLIT_AXES[1:]), {}).setdefault(mesh.dp > 1, mesh)
        for of_dp in kinds.values():
            # What is placed beside dp goes without it too.
            for mesh in (of_dp[has_dp] for has_dp in (True, False) if has_dp in of_dp):
                if self.record.is_late or self.placer.spent > _MANY_CHOICES:
                    return
                known = self.placer.known(mesh)
                if not any(not seconds_per_byte or index in self.placer.lean for index in known):
                    found = self.placer.solve(mesh, seconds_per_byte)
                    if isinstance(found, str):
                        self.useless[found] = None

    def _split_samples(self, order: Sequence[Mesh]) -> Sequence[Mesh]:
        """Which meshes with cp are worth a look: microbatches of less than a sample, for more of them or less memory.

        Once something fits, those where cp and tp together have as many ranks as the best mesh's tp, or twice as many.
        """
        best = min(self.record.fitting, key=rank, default=None)
        if best is None:
            return order
        if best.mesh.pp == 1 and best.activation_checkpoint == "none" and best.zero != FREED:
            return ()  # nothing waits, and memory costs nothing
        ep, tp = best.mesh.ep, best.mesh.tp
        return [mesh for mesh in order if mesh.ep == ep and tp <= mesh.cp * mesh.tp <= 2 * tp]

    def _prove(self, order: list[Mesh]) -> Proven:
        """Search all choices together, from the best plan that is known."""
        known = min(self.record.fitting, key=rank, default=None)
        proven = ExactSearch(self.setting, self._leaves(), known).run(order)
        self.solved += proven.solved
        if proven.best is not None and proven.best is not known:
            self.record.found.append(proven.best)
        return proven

    def _leaves(self) -> Leaves:
        return Leaves(
            price=self._price_leaf,
            uses=lambda mesh: Uses(self.space, self.pricer.prices(mesh)),
            rules=self.placer.rules,
            fixed=self.placer.batch_labels,
            seconds_left=lambda: self.record.seconds_left,
        )

    def _keep(self, candidate: Candidate | None) -> None:
        if candidate is not None and candidate.fits:
            self.record.add([candidate])

    def _price_leaf(self, mesh: Mesh, placements: Placements, policy: Policy) -> Candidate | None:
        return self.pricer.leaf(mesh, placements, policy, self.record.best_seconds)

    def _bound(self, mesh: Mesh) -> float:
        setting = self.setting
        shards = max(zeros_for(mesh, setting.pins)) >= 1
        pipelines = self.pricer.pipelines(mesh)
        return bound_seconds(self.whole, mesh, setting.cluster, setting.optimizer, shards=shards, pipelines=pipelines)

    def _least_bytes(self, mesh: Mesh) -> float:
        return self.setting.cluster.gpu.overhead_bytes + self.states.least(mesh, self.setting.pins)

    def _refuse(self) -> None:
        if self.record.found:
            raise NothingFits(min(self.record.found, key=_shortfall), self.batch.obstacle)
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
            if self.record.found:
                return
            self.record.found.extend(self._solve(mesh, once=True))

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
            new = self.pricer.priced(mesh, placements, inf if once else self.record.best_seconds)
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

    def _priced_as_known(self, mesh: Mesh) -> tuple[Candidate, ...]:
        """The mesh under what others have found, where programs are large; else, and without that, under its own."""
        known = [index for index in self.placer.known(mesh) if index not in self.placer.lean]
        if self.placer.spent <= _FEW_CHOICES or not known:
            return self._solve(mesh, once=True)
        candidates: list[Candidate] = []
        for index in known:
            try:
                candidates.extend(self.pricer.priced(mesh, self.placer.taken(mesh, index)).candidates)
            except CannotLower:
                continue
        return best_of(candidates)

    def _memory_prices(self, mesh: Mesh, seconds_per_byte: float) -> Sequence[float]:
        """Prices of memory worth a try: none where the highest leaves the placements as they are, for then all do."""
        prices = [factor * seconds_per_byte for factor in _MEMORY_PRICES]
        return () if self.placer.solve(mesh, prices[0]) == self.placer.solve(mesh, 0.0) else prices

    def _seconds_per_byte(self, candidates: Sequence[Candidate]) -> float:
        """What the device's memory costs if all of it is worth a step, to a power of ten."""
        step = min((candidate.cost.step_seconds for candidate in candidates), default=self.record.best_seconds)
        return 10.0 ** round(log10(step / self.setting.cluster.gpu.hbm_bytes))


def _shortfall(candidate: Candidate) -> int:
    """Bytes that the fullest rank needs and does not have."""
    memory = zip(candidate.cost.rank_memory, candidate.hbm_bytes, strict=True)
    return max(each["total"] - room for each, room in memory)
