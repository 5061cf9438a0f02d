"""Nothing fits -> an answer: which stage, how much is missing, what holds it, and the nearest change that fits,
evaluated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ...cost_models.errors import AutoparError
from ...cost_models.units import GIB
from ..errors import InfeasibleError
from .candidates import Pins
from .sweep import Candidate, NothingFits, Setting, search

_MOST_GPUS_FACTOR = 64


def explain(setting: Setting, least: Candidate) -> InfeasibleError:
    """The error to raise; `least` is the candidate that needs the least memory."""
    ranks = enumerate(zip(least.cost.rank_memory, least.hbm_bytes, strict=True))
    rank, (memory, room) = max(ranks, key=lambda item: item[1][0]["total"] - item[1][1])
    needs, has = memory["total"] / GIB, room / GIB
    parts = sorted(((size, name) for name, size in memory.items() if name != "total" and size), reverse=True)
    held = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for size, name in parts[:3])
    mesh = ",".join(f"{name}={size}" for name, size in least.mesh.written.items())
    where = "rank" if len(least.stages) > least.mesh.pp else "stage"
    nearest = next(_changes(setting), None)
    return InfeasibleError(
        f"no plan fits in memory: needs {needs:.1f} GiB per GPU, have {has:.1f} GiB ({held})",
        where=f"{where} {rank} of the leanest plan found: {mesh}, {least.mesh.microbatches} microbatches, "
        f"zero={least.zero}, activation checkpointing {least.activation_checkpoint}",
        fix=nearest or "no nearby change fits: use GPUs with more memory, or a smaller model",
    )


def _changes(setting: Setting) -> Iterator[str]:
    """Changes that fit, the smallest first, each searched."""
    pins = setting.pins
    for name, text in (
        ("activation_checkpoint", "activation checkpointing"),
        ("zero", "the ZeRO stage"),
        ("microbatch_size", "the microbatch size"),
        ("schedule", "the schedule"),
        ("stages_per_rank", "the stages per rank"),
    ):
        if getattr(pins, name) is not None and _fits(replace(setting, pins=replace(pins, **{name: None}))):
            yield f"let {text} free (not pinned)"
    if pins.mesh and _fits(replace(setting, pins=replace(pins, mesh={}))):
        yield "let the mesh free (not pinned)"
    free = Pins(mesh={})
    factor = 2
    while factor <= _MOST_GPUS_FACTOR:
        gpus = setting.gpus * factor
        if _fits(replace(setting, gpus=gpus, pins=free)):
            yield f"use {gpus} GPUs"
        factor *= 2


def _fits(setting: Setting) -> bool:
    try:
        setting.cluster.check_gpus(setting.gpus)
        search(setting)
    except (NothingFits, AutoparError):
        return False
    return True
