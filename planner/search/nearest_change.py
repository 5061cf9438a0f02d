"""A setting that nothing fits -> the nearest change under which something does.

The leanest plan that the search has seen tells about what plans on other meshes need (`least_memory.py`). The leanest
of them by that estimate are searched with mesh and microbatches pinned, which takes a fraction of a free search; a
change is offered once such a plan has been priced and fits, and the plan is named with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, inf

from ...cost_models.errors import AutoparError
from ...cost_models.units import GIB
from ..blocks import by_pattern, written
from ..capture.graph import ModelGraph
from ..sharding.mesh import Mesh
from .answer import Candidate, NothingFits, Setting
from .batch import find_batch_split
from .candidates import possible_meshes
from .least_memory import Estimate, states_of
from .policies import zeros_for
from .prices import in_precision
from .space import Space
from .sweep import some_plan

_MOST_GPUS_FACTOR = 64
_TRIES = 2  # meshes of a change
_TRIED_FACTORS = 3  # of GPUs or samples, from the first that may do
_TOLERANCE = 1.2  # of the estimate

_FLAGS = ("zero", "activation_checkpoint")  # and the mesh, of the plan that shows a change
_PINS = (
    ("activation_checkpoint", "activation checkpointing"),
    ("zero", "the ZeRO stage"),
    ("zero_shard_size", "the ranks that ZeRO splits over"),
    ("microbatch_size", "the microbatch size"),
    ("stages_per_rank", "the stages per rank"),
    ("schedule", "the schedule"),
)


@dataclass(frozen=True)
class Changes:
    """Changes of `setting`; `smaller` captures the model with fewer samples a step."""

    setting: Setting
    nothing: NothingFits
    smaller: Callable[[int], ModelGraph] | None = None

    def nearest(self) -> str:
        """The smallest change that fits with a plan that shows it, "" if there is none."""
        for text, found in self._found():
            return f"{text}: {self._flags(found)} needs {found.cost.memory_bytes / GIB:.1f} GiB"
        return ""

    def _found(self) -> Iterator[tuple[str, Candidate]]:
        for offered in (self._pins_let_go(), self._fewer_samples(), self._more_gpus(), self._more_memory()):
            for text, setting in offered:
                found = self._fitting(setting)
                if found is not None:
                    yield text, found

    # --- changes ---

    def _pins_let_go(self) -> Iterator[tuple[str, Setting]]:
        setting, pins = self.setting, self.setting.pins
        given = [(name, text) for name, text in _PINS if getattr(pins, name) is not None]
        for name, text in given:
            yield f"leave {text} free (not pinned)", replace(setting, pins=replace(pins, **{name: None}))
        if pins.mesh:
            yield "leave the mesh free (not pinned)", replace(setting, pins=replace(pins, mesh={}))
        if len(given) + bool(pins.mesh) > 1:
            yield "leave all pins free", self._without_pins

    def _fewer_samples(self) -> Iterator[tuple[str, Setting]]:
        """Where the step cannot be cut into microbatches; elsewhere a batch of any size needs as much."""
        batch = self.setting.graph.batch_size
        if self.smaller is None or not self.nothing.obstacle:
            return
        sizes = [batch // part for part in (2, 4, 8, 16, 32, 64) if batch % part == 0]
        hopeful = [size for size in sizes if self._scaled(size / batch) <= _TOLERANCE * self._room]
        for size in hopeful[:_TRIED_FACTORS]:
            yield f"take --batch-size {size}{self._and_leave}", replace(self._without_pins, graph=self.smaller(size))

    def _more_gpus(self) -> Iterator[tuple[str, Setting]]:
        tried = 0
        factor = 2
        while factor <= _MOST_GPUS_FACTOR and tried < _TRIED_FACTORS:
            setting = replace(self._without_pins, gpus=self.setting.gpus * factor)
            factor *= 2
            try:
                setting.cluster.check_gpus(setting.gpus)
            except AutoparError:
                return
            if self._least(setting) <= _TOLERANCE * self._room:
                tried += 1
                yield f"use {setting.gpus} GPUs{self._and_leave}", setting

    def _more_memory(self) -> Iterator[tuple[str, Setting]]:
        setting, least = self.setting, self.nothing.least
        if setting.cluster.groups:
            return
        gib = ceil(least.cost.memory_bytes / GIB)
        cluster = replace(setting.cluster, gpu=replace(setting.cluster.gpu, hbm_bytes=gib * GIB))
        yield f"use GPUs with {gib} GiB (--hbm-gib {gib})", replace(setting, cluster=cluster)

    @property
    def _without_pins(self) -> Setting:
        pins = self.setting.pins
        free = {name: None for name, _ in _PINS}
        return replace(self.setting, pins=replace(pins, mesh={}, **free))

    @property
    def _and_leave(self) -> str:
        """The pins that `_without_pins` lets go and `_flags` does not replace."""
        pins = self.setting.pins
        given = [text for name, text in _PINS if name not in _FLAGS and getattr(pins, name) is not None]
        return f" and leave {' and '.join(given)} free (not pinned)" if given else ""

    def _flags(self, found: Candidate) -> str:
        """The plan as pins, in place of those of the same names."""
        graph = self.setting.graph
        mesh = ",".join(f"{name}={size}" for name, size in found.mesh.written.items())
        stages = written(by_pattern(graph, found.zero)) or found.zero
        is_said = found.mesh.state_ranks > 1 or self.setting.pins.zero is not None
        zero = f" --zero {stages}" if is_said else ""
        checkpoint = written(by_pattern(graph, found.activation_checkpoint)) or found.activation_checkpoint
        return f"--mesh {mesh}{zero} --activation-checkpoint {checkpoint}"

    # --- what they need ---

    @cached_property
    def _space(self) -> Space:
        return Space(in_precision(self.setting.graph, self.setting.precision))

    @property
    def _room(self) -> int:
        return self.setting.cluster.gpu.hbm_bytes

    @cached_property
    def _estimate(self) -> Estimate:
        return Estimate(
            known=self.nothing.least,
            batch_size=self.setting.graph.batch_size,
            states=states_of(self.setting),
            overhead_bytes=self.setting.cluster.gpu.overhead_bytes,
        )

    def _scaled(self, share: float) -> float:
        """What the leanest plan would need with this share of its samples."""
        fullest = max(self.nothing.least.cost.rank_memory, key=lambda memory: memory["total"])
        return fullest["total"] - (1 - share) * (fullest["activations"] + fullest["temporary"])

    def _ranked(self, setting: Setting) -> list[tuple[float, Mesh]]:
        """Meshes with their microbatches, the leanest by the estimate first; one number of microbatches of each."""
        space = self._space
        if setting.graph is not self.setting.graph:
            space = Space(in_precision(setting.graph, setting.precision))
        every, _ = possible_meshes(space, find_batch_split(space), setting.gpus, setting.pins)
        least: dict[Mesh, tuple[float, Mesh]] = {}
        size = setting.graph.batch_size
        for mesh in every:
            needs = min(self._estimate.num_bytes(mesh, zero, size) for zero in zeros_for(mesh, setting.pins))
            sizes = replace(mesh, microbatches=1)
            if sizes not in least or needs < least[sizes][0]:
                least[sizes] = needs, mesh
        in_node = setting.cluster.gpus_per_node

        def rank(item: tuple[float, Mesh]) -> tuple[bool, bool, float, int, int]:
            """Where several may fit, tensor parallelism within a node is what people run."""
            needs, mesh = item
            return needs > self._room, mesh.tp > in_node, needs, mesh.pp, -mesh.tp

        return sorted(least.values(), key=rank)

    def _least(self, setting: Setting) -> float:
        return min((needs for needs, _ in self._ranked(setting)), default=inf)

    def _fitting(self, setting: Setting) -> Candidate | None:
        """A plan that fits, on one of the leanest meshes."""
        for _, mesh in self._ranked(setting)[:_TRIES]:
            samples = setting.graph.batch_size // (mesh.dp * mesh.microbatches)
            pins = replace(setting.pins, mesh=mesh.sizes, microbatch_size=samples)
            try:
                found = some_plan(replace(setting, pins=pins, exact=False, time_limit_seconds=None))
            except AutoparError:
                continue
            if found is not None:
                return found
        return None


__all__ = ["Changes"]
