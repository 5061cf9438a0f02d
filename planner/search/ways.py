"""Placements on a mesh -> every policy for them that may win, with the seconds that no cut of it is faster than."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..checkpointing import Checkpointing
from ..schedules import get_schedule
from ..zero import FREED, KEPT, Zero
from .answer import Setting
from .evaluate import Evaluator
from .even_pipeline import EvenPipelines
from .floors import Fitting, fitting_seconds, floor_bytes, floor_seconds
from .pins import Pins
from .policies import Pipeline, checkpoints_for, num_cuttable, pipelines_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A policy for given placements. No cut is faster than `floor_seconds`; none that fits, with whatever blocks run
    again, is faster than `fitting.least`: nor one where some blocks are under ZeRO-2 instead of ZeRO-3, and if none
    are, than `uniform_seconds`. `level`: how much runs again, 0 for the least."""

    floor_seconds: float
    fitting: Fitting
    uniform_seconds: float
    evaluator: Evaluator
    pipeline: Pipeline
    zero: Zero
    checkpoint: Checkpointing
    level: int

    @property
    def arrangement(self) -> tuple[object, ...]:
        """All but the checkpointing."""
        return self.pipeline, self.zero, self.evaluator.mesh.replicas

    @property
    def kept(self) -> tuple[object, ...]:
        """The arrangement under ZeRO-2."""
        return self.pipeline, KEPT, self.evaluator.mesh.replicas

    @property
    def policy(self) -> tuple[Evaluator, Pipeline, Zero, Checkpointing]:
        return self.evaluator, self.pipeline, self.zero, self.checkpoint

    @property
    def floor_bytes(self) -> float:
        """No cut leaves every rank with less."""
        return floor_bytes(*self.policy)


def ways_of(
    setting: Setting,
    sharded: Sequence[tuple[Zero, Evaluator]],
    hbm_bytes: Sequence[int],
    known_seconds: float,
) -> Iterator[Way]:
    """Every policy that may beat `known_seconds`, were there memory enough.

    `sharded`: ZeRO stages with the evaluator of their groups; `hbm_bytes`: by pipeline rank.
    """
    graph, pins = setting.graph, setting.pins
    cuttable = num_cuttable(graph)
    every = checkpoints_for(graph, pins)
    even = EvenPipelines(sharded[0][1])
    fitting: dict[tuple[object, ...], Fitting] = {}

    def fits(evaluator: Evaluator, pipeline: Pipeline, zero: Zero) -> Fitting:
        key = (pipeline, zero, evaluator.mesh.replicas)
        if key not in fitting:
            fitting[key] = fitting_seconds(even, evaluator, pipeline, zero, every, hbm_bytes, known_seconds)
        return fitting[key]

    for level, checkpoint in enumerate(every):
        if sharded[0][1].least_seconds(checkpoint) >= known_seconds:
            break
        for zero, evaluator in sharded:
            least = KEPT if zero == FREED and may_mix(pins, evaluator) else zero
            for pipeline in pipelines_for(evaluator.mesh, pins, cuttable, zero):
                if zero == FREED and _frees_in_vain(pins, evaluator, pipeline):
                    continue
                floor = floor_seconds(evaluator, pipeline, least, checkpoint)
                if floor >= known_seconds:
                    continue
                uniform = floor if least == zero else floor_seconds(evaluator, pipeline, zero, checkpoint)
                fitted = fits(evaluator, pipeline, least)
                yield Way(
                    floor_seconds=floor,
                    fitting=Fitting(max(floor, fitted.least), max(floor, fitted.likely)),
                    uniform_seconds=max(uniform, fits(evaluator, pipeline, zero).least),
                    evaluator=evaluator,
                    pipeline=pipeline,
                    zero=zero,
                    checkpoint=checkpoint,
                    level=level,
                )


def may_mix(pins: Pins, evaluator: Evaluator) -> bool:
    """Whether blocks may be under ZeRO-2 and under ZeRO-3, and it makes a difference to memory."""
    return pins.zero is None and evaluator.costs.memory.frees_parameters


def _frees_in_vain(pins: Pins, evaluator: Evaluator, pipeline: Pipeline) -> bool:
    """Whether ZeRO-2 takes as little memory as ZeRO-3, whose gathers the parts of a backward would wait for."""
    is_split = get_schedule(pipeline[0]).splits_backward
    return is_split and pins.zero is None and not evaluator.costs.memory.frees_parameters


__all__ = ["Way", "may_mix", "ways_of"]
