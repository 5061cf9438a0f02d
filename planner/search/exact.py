"""All choices together, nothing pruned that is not proven: the search behind `--exact`.

A leaf is a mesh, a number of microbatches, a cut, a schedule, a ZeRO stage and recomputation of every block; one of
ZeRO-3 stands for the mixes of ZeRO-2 and ZeRO-3 too, whose bounds are its own, and prices under the best of them. Its
placements over all axes are the integer program of `step_model.py`, whose optimum no plan of the leaf beats. Leaves
whose bound reaches the best plan known are dropped. In a leaf that is left, the program gives one assignment after the
other, cheapest first; each is lowered, priced and checked against memory as any plan is, and then forbidden, until the
program's optimum reaches the best plan. What is then best is best of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from ..checkpointing import Checkpointing
from ..sharding.mesh import MICROBATCH, Mesh
from ..zero import Zero
from .assignment import NoAssignment, Stopped
from .joint import Joint
from .mesh_bounds import fewest_passes
from .placements_ilp import consistent
from .policies import checkpoints_for, num_cuttable, pipelines_for, shardings_for
from .problem import Built, build_problem
from .recompute import every_mix
from .space import Rules
from .step_model import Policy, StepModel
from .step_uses import Uses

if TYPE_CHECKING:
    from ..sharding.program import Placements
    from .sweep import Candidate, Setting

# Bounds this close to the best plan are equal to it: what the solver's tolerances can hide.
_EQUAL = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaves:
    """What the exact search needs of the sweep around it.

    `price` lowers and prices placements under a policy, None where they cannot be lowered. `fixed`: the labels of axes
    that are given (microbatches). `seconds_left`: of the time limit, None without one.
    """

    price: Callable[[Mesh, Placements, Policy], Candidate | None]
    uses: Callable[[Mesh], Uses]
    rules: Rules
    fixed: Callable[[Mesh], Placements]
    seconds_left: Callable[[], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """The best plan, None where none fits; `bound_seconds` holds for all that was not looked at."""

    best: Candidate | None
    bound_seconds: float
    is_complete: bool
    solved: int


class ExactSearch:
    """Runs over meshes in the order given, the most promising first; keeps the best plan."""

    def __init__(self, setting: Setting, leaves: Leaves, best: Candidate | None) -> None:
        self.setting, self.leaves = setting, leaves
        self.best = best
        self.solved = 0
        self.open_bound = inf  # of what the time limit cut off

    @property
    def seconds(self) -> float:
        return inf if self.best is None else self.best.cost.step_seconds

    def run(self, meshes: Sequence[Mesh]) -> Proven:
        """Search every mesh."""
        is_complete = True
        for mesh in meshes:
            if self._is_late:
                is_complete = False
                self.open_bound = 0.0
                break
            is_complete &= self._mesh(mesh)
        bound = self.seconds if is_complete else min(self.open_bound, self.seconds)
        return Proven(best=self.best, bound_seconds=bound, is_complete=is_complete, solved=self.solved)

    @property
    def _is_late(self) -> bool:
        return self.leaves.seconds_left() == 0

    def _closed(self, bound: float) -> bool:
        return bound >= self.seconds * (1 - _EQUAL)

    def _mesh(self, mesh: Mesh) -> bool:
        """Whether the mesh was searched to its end."""
        try:
            joint = joint_problem(self.leaves, self.leaves.uses(mesh))
        except NoAssignment:
            return True
        leaves: list[tuple[float, Policy]] = []
        if self._closed(floor_seconds(self.setting, joint, mesh, self.leaves.seconds_left())):
            return True
        for zero, replicas in shardings_for(self.setting.graph, mesh, self.setting.pins, self.setting.cluster):
            for checkpoint in checkpoints_for(self.setting.graph, self.setting.pins):
                policy = self._any_cut(mesh, zero, replicas, checkpoint)
                bound = self._relaxed(mesh, joint, policy)
                if not self._closed(bound):
                    leaves.extend(self._cuts(mesh, policy, bound))
            if self.setting.pins.activation_checkpoint is None:
                # No mix is faster than no recomputation, which need not fit.
                policy = self._any_cut(mesh, zero, replicas, "none")
                bound = self._relaxed(mesh, joint, replace(policy, must_fit=False))
                if not self._closed(bound):
                    leaves.extend(self._mixes(mesh, policy, bound))
        leaves.sort(key=lambda leaf: leaf[0])
        for bound, policy in leaves:
            if self._closed(bound):
                break
            if self._is_late or not self._leaf(mesh, joint, policy):
                self.open_bound = min(self.open_bound, leaves[0][0])
                return False
        return True

    def _any_cut(self, mesh: Mesh, zero: Zero, replicas: int, checkpoint: Checkpointing) -> Policy:
        return Policy(
            stages=None,
            zero=zero,
            schedule="none",
            activation_checkpoint=checkpoint,
            replicas=replicas,
            passes=_passes(self.setting, mesh),
        )

    def _relaxed(self, mesh: Mesh, joint: Joint, policy: Policy) -> float:
        """A bound of all cuts and schedules; infinite where none fits in memory."""
        try:
            self.solved += 1
            model = model_of(self.setting, joint, mesh, policy)
            return model.solve(as_mip=False, time_limit_seconds=self.leaves.seconds_left())[0]
        except Stopped:
            return 0.0
        except NoAssignment:
            return inf

    def _cuts(self, mesh: Mesh, policy: Policy, bound: float) -> Iterator[tuple[float, Policy]]:
        last = len(self.setting.graph.units)
        assert policy.zero is not None
        for schedule, per_rank in pipelines_for(mesh, self.setting.pins, last - 1, policy.zero):
            for stages in every_cut(last, mesh.pp * per_rank):
                yield bound, replace(policy, schedule=schedule, stages=stages)

    def _mixes(self, mesh: Mesh, policy: Policy, bound: float) -> Iterator[tuple[float, Policy]]:
        """Every cut and schedule with blocks under several policies."""
        graph = self.setting.graph
        for schedule, per_rank in pipelines_for(mesh, self.setting.pins, len(graph.units) - 1, policy.zero or 0):
            for stages in every_cut(len(graph.units), mesh.pp * per_rank):
                for mix in every_mix(graph, stages):
                    yield bound, replace(policy, schedule=schedule, stages=stages, activation_checkpoint=mix)

    def _leaf(self, mesh: Mesh, joint: Joint, policy: Policy) -> bool:
        """Assignments of one leaf, cheapest first, until no other can be better. False: the time was up."""
        try:
            model = model_of(self.setting, joint, mesh, policy)
            self.solved += 1
            if self._closed(model.solve(as_mip=False, time_limit_seconds=self.leaves.seconds_left())[0]):
                return True
            while not self._is_late:
                self.solved += 1
                bound, chosen = model.solve(as_mip=True, time_limit_seconds=self.leaves.seconds_left())
                if self._closed(bound):
                    return True
                assert chosen is not None
                self._look_at(mesh, joint.built, chosen, policy)
                model.forbid(chosen)
        except Stopped:
            return False
        except NoAssignment:
            return True
        return False

    def _look_at(self, mesh: Mesh, built: Built, chosen: tuple[int, ...], policy: Policy) -> None:
        placements = built.read(len(self.setting.graph.templates), chosen)
        candidate = self.leaves.price(mesh, placements, policy)
        if candidate is not None and candidate.fits and candidate.cost.step_seconds < self.seconds:
            self.best = candidate


def joint_problem(leaves: Leaves, uses: Uses) -> Joint:
    """The placements of a mesh over all axes together.

    Raises:
        NoAssignment: there are none.
    """
    mesh = uses.prices.mesh
    free = tuple(axis.name for axis in mesh.axes if axis.name != MICROBATCH)
    built = build_problem(uses.space, mesh.axes, free, leaves.fixed(mesh), leaves.rules, uses, mesh.microbatches)
    return Joint(built=built, uses=uses, alive=consistent(built.problem))


def model_of(setting: Setting, joint: Joint, mesh: Mesh, policy: Policy) -> StepModel:
    """The step of a policy as a linear program."""
    return StepModel(
        joint, policy, mesh=mesh, master=setting.graph, optimizer=setting.optimizer, precision=setting.precision
    )


def floor_seconds(setting: Setting, joint: Joint, mesh: Mesh, time_limit_seconds: float | None = None) -> float:
    """No plan on the mesh is faster, under whatever policy; infinite where there are no placements."""
    shardings = shardings_for(setting.graph, mesh, setting.pins, setting.cluster)
    zero, replicas = shardings[0] if len(shardings) == 1 else (None, 1)
    policy = Policy(
        stages=((0, len(setting.graph.units)),) if mesh.pp == 1 else None,
        zero=zero,
        schedule="none",
        activation_checkpoint="none",
        replicas=replicas,
        must_fit=False,
        passes=_passes(setting, mesh),
    )
    try:
        model = model_of(setting, joint, mesh, policy)
        return model.solve(as_mip=False, time_limit_seconds=time_limit_seconds)[0]
    except Stopped:
        return 0.0
    except NoAssignment:
        return inf


def _passes(setting: Setting, mesh: Mesh) -> float:
    return fewest_passes(mesh, pipelines_for(mesh, setting.pins, num_cuttable(setting.graph)))


def every_cut(last: int, runs: int, first: int = 0) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way to cut units [first, last) into so many runs; the prelude, unit 0, is no run of its own."""
    if runs == 1:
        yield ((first, last),)
        return
    for end in range(max(first, 1) + 1, last - runs + 2):
        for rest in every_cut(last, runs - 1, end):
            yield ((first, end), *rest)


__all__ = ["ExactSearch", "Leaves", "Proven", "every_cut", "floor_seconds", "joint_problem", "model_of"]
