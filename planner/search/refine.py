"""What the sweep found -> a tighter bound, and a better plan where the whole step as one program knows one.

The sweep prices placements axis by axis and memory by lambda. Where all axes together are a program of modest size, its
relaxation (`step_model.py`) bounds every plan of a mesh, and its solution under the policy of the best plan is one more
plan to price. What is done depends on sizes alone, never on time, so plans stay the same from run to run.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import inf
from typing import TYPE_CHECKING

from ..checkpointing import Checkpointing, runs_more_again
from ..sharding.mesh import SPLIT_AXES, Mesh
from ..zero import highest
from .assignment import NoAssignment
from .exact import Leaves, every_cut, floor_seconds, joint_problem, model_of
from .joint import Joint
from .least_memory import states_of
from .policies import checkpoints_for, num_cuttable, pipelines_for, shardings_for
from .step_model import Policy, StepModel
from .step_uses import Uses

if TYPE_CHECKING:
    from .sweep import Candidate, Setting

_MOST_CHOICES = 700  # of the vertices of a program that is solved at all
_MOST_CUTS = 12  # of a pipeline, to try each where nothing fits
_PLACED_CHOICES = 350  # of one that is asked for a better plan where there is one
_MOST_TRIES = 8  # assignments of a program whose memory is then found to be too large
_ALL_CHOICES = 3000  # of all programs of one search
_WORTH = 0.01  # of the gap: where programs could close no more of it, none is built

Cut = tuple[tuple[int, int], ...]


@dataclass
class Refiner:
    """Joint programs of meshes, built once, as long as the budget of choices lasts."""

    setting: Setting
    leaves: Leaves
    spent: int = 0

    def __post_init__(self) -> None:
        self._joint: dict[Mesh, Joint | None] = {}
        self._of_kind: dict[Hashable, Joint | None] = {}

    def joint(self, mesh: Mesh) -> Joint | None:
        """The program of a mesh, None where it is too large.

        Raises:
            NoAssignment: the mesh has no placements.
        """
        if mesh not in self._joint:
            self._joint[mesh] = self._build(mesh, self.leaves.uses(mesh))
        return self._joint[mesh]

    def _build(self, mesh: Mesh, uses: Uses) -> Joint | None:
        if self._is_large(mesh) or self.spent + self._num_nodes * _num_axes(mesh) ** 2 > _ALL_CHOICES:
            return None
        joint = joint_problem(self.leaves, uses)
        size = joint.num_choices
        if size > _MOST_CHOICES or self.spent + size > _ALL_CHOICES:
            return None
        self.spent += size
        return joint

    @cached_property
    def _num_nodes(self) -> int:
        return sum(len(template.nodes) for template in self.setting.graph.templates)

    def _is_large(self, mesh: Mesh) -> bool:
        """Whether its choices are not even listed: two axes square those of a node."""
        return self._num_nodes * _num_axes(mesh) ** 3 > _MOST_CHOICES // 2

    def bound(self, best: Candidate, bounds: Mapping[Mesh, float]) -> float:
        """A lower bound of all plans; `bounds` are lower bounds of every mesh, improved where they are below `best`."""
        # What no program improves bounds the answer at once, and ends the work on the others.
        large = (bounds[mesh] for mesh in bounds if self._is_large(mesh))
        found = min((best.cost.step_seconds, *large))
        alike: dict[Hashable, list[Mesh]] = {}
        for mesh in bounds:
            alike.setdefault(_kind(mesh), []).append(mesh)
        for mesh in sorted(bounds, key=lambda mesh: (bounds[mesh], mesh.pp, mesh.tp, mesh.microbatches)):
            if found - bounds[mesh] <= _WORTH * (best.cost.step_seconds - bounds[mesh]):
                return min(found, bounds[mesh])
            better = self._floor(mesh, alike[_kind(mesh)])
            found = min(found, max(better, bounds[mesh]))
        return found

    def _floor(self, mesh: Mesh, alike: Sequence[Mesh]) -> float:
        try:
            joint = self.joint(mesh) if alike == [mesh] else self._joint.get(mesh) or self._joint_of(alike)
        except NoAssignment:
            return inf if alike == [mesh] else 0.0
        return 0.0 if joint is None else floor_seconds(self.setting, joint, mesh, self.leaves.seconds_left())

    def _joint_of(self, alike: Sequence[Mesh]) -> Joint | None:
        """A program for meshes of one kind, in which no placement takes longer than on any of them.

        What dp splits has equal local sizes on all, and what it does not is smallest with most microbatches. Messages
        over dp, of which it has different numbers of ranks, are left out.

        Raises:
            NoAssignment: the kind has no placements.
        """
        finest = max(alike, key=lambda mesh: mesh.microbatches)
        kind = _kind(finest)
        if kind not in self._of_kind:
            uses = replace(self.leaves.uses(finest), free_axes=frozenset(("dp",)))
            self._of_kind[kind] = self._build(finest, uses)
        return self._of_kind[kind]

    def better(self, candidate: Candidate) -> Iterator[Candidate]:
        """Plans of the candidate's mesh and cut, as the whole program places them: under every policy for all blocks,
        and under the candidate's own. None where it is large."""
        try:
            joint = self.joint(candidate.outer)
        except NoAssignment:
            return
        if joint is None or joint.num_choices > _PLACED_CHOICES:
            return
        checkpoints = checkpoints_for(self.setting.graph, self.setting.pins)
        if candidate.activation_checkpoint not in checkpoints:
            checkpoints = (*checkpoints, candidate.activation_checkpoint)
        known = candidate.cost.step_seconds
        yield from self._placed(candidate.outer, candidate.schedule, (candidate.stages,), checkpoints, known)

    def _placed(
        self, mesh: Mesh, schedule: str, cuts: Sequence[Cut], checkpoints: Sequence[Checkpointing], known: float
    ) -> Iterator[Candidate]:
        try:
            joint = self.joint(mesh)
        except NoAssignment:
            return
        if joint is None:
            return
        gpu, states = self.setting.cluster.gpu, states_of(self.setting)
        room = gpu.hbm_bytes - gpu.overhead_bytes
        shardings = shardings_for(self.setting.graph, mesh, self.setting.pins, self.setting.cluster)
        for stages, (zero, replicas) in product(cuts, shardings):
            if states.held(mesh, highest(zero), mesh.state_ranks // replicas) > room:
                continue
            closed = inf  # the relaxation of a policy that memory did not keep from the best placements
            roomy: list[Checkpointing] = []  # policies that have these without filling the memory
            for checkpoint in checkpoints:
                # Computing more again only helps where it makes room for cheaper placements.
                if any(runs_more_again(self.setting.graph, checkpoint, than=other) for other in roomy):
                    continue
                policy = Policy(
                    stages=stages, zero=zero, schedule=schedule, activation_checkpoint=checkpoint, replicas=replicas
                )
                try:
                    model = model_of(self.setting, joint, mesh, policy)
                    bound, chosen = model.solve(as_mip=False, time_limit_seconds=self.leaves.seconds_left())
                    has_room = model.has_room
                    found = None
                    if bound < min(known, closed):
                        found = self._solved(mesh, joint, model, chosen, known)
                        closed = bound
                except NoAssignment:
                    continue
                if has_room:
                    roomy.append(checkpoint)
                if found is not None:
                    known = min(known, found.cost.step_seconds)
                    yield found

    def _solved(
        self, mesh: Mesh, joint: Joint, model: StepModel, chosen: tuple[int, ...] | None, known: float
    ) -> Candidate | None:
        """The program's answer, None where it is not below `known`; where its memory row, a lower bound, was too kind,
        the next best that fits. `chosen` is that of the relaxation, if integral.

        Raises:
            NoAssignment: nothing fits, as far as was looked.
        """
        for tries in range(_MOST_TRIES):
            if chosen is None:
                left = self.leaves.seconds_left()
                bound, chosen = model.solve(as_mip=True, time_limit_seconds=left, known_seconds=known)
                if bound >= known:
                    if not tries:
                        return None
                    break
            assert chosen is not None
            placements = joint.built.read(len(self.setting.graph.templates), chosen)
            plan = self.leaves.price(mesh, placements, model.policy)
            if plan is not None and plan.fits:
                return plan
            model.forbid(chosen)
            chosen = None
        raise NoAssignment

    def rescue(self, meshes: Iterable[Mesh], found: Sequence[Candidate]) -> Candidate | None:
        """A plan that fits where the sweep found none, the fastest; pipelines with many cuts keep those in `found`."""
        checkpoints = checkpoints_for(self.setting.graph, self.setting.pins)
        fitting: list[Candidate] = []
        for mesh in meshes:
            schedule, per_rank = pipelines_for(mesh, self.setting.pins, num_cuttable(self.setting.graph))[0]
            num_stages = mesh.pp * per_rank
            cuts = tuple(islice(every_cut(len(self.setting.graph.units), num_stages), _MOST_CUTS + 1))
            if len(cuts) > _MOST_CUTS:
                known = (candidate.stages for candidate in found if candidate.outer == mesh)
                cuts = tuple(dict.fromkeys(stages for stages in known if len(stages) == num_stages))
            fitting.extend(self._placed(mesh, schedule, cuts, checkpoints, inf))
        return min(fitting, key=lambda candidate: candidate.cost.step_seconds, default=None)


def _kind(mesh: Mesh) -> Hashable:
    """Equal for meshes whose ranks run the same program in a microbatch: dp and microbatches both split the batch."""
    if mesh.dp == 1 or mesh.microbatches == 1:
        return mesh
    return (mesh.dp * mesh.microbatches, *(mesh.sizes[name] for name in SPLIT_AXES if name != "dp"))


def _num_axes(mesh: Mesh) -> int:
    return sum(not axis.is_time for axis in mesh.axes)
