"""Nothing fits -> an answer: which stage, how much is missing, what holds it, and the nearest change that fits."""

from __future__ import annotations

from collections.abc import Callable

from ...cost_models.units import GIB, format_bytes
from ..blocks import by_pattern
from ..capture.graph import ModelGraph
from ..checkpointing import name_of
from ..errors import InfeasibleError
from ..zero import highest, zero_text
from .answer import NothingFits, Setting
from .nearest_change import Changes

_SHOWN_GIB = 0.05  # less is 0.0 GiB


def explain(
    setting: Setting, nothing: NothingFits, smaller: Callable[[int], ModelGraph] | None = None
) -> InfeasibleError:
    """The error to raise. `smaller` captures the model with fewer samples a step."""
    least = nothing.least
    ranks = enumerate(zip(least.cost.rank_memory, least.hbm_bytes, strict=True))
    rank, (memory, room) = max(ranks, key=lambda item: item[1][0]["total"] - item[1][1])
    needs, has = memory["total"] / GIB, room / GIB
    parts = sorted(((size, name) for name, size in memory.items() if name != "total" and size), reverse=True)
    held = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f} GiB" for size, name in parts[:3])
    mesh = ",".join(f"{name}={size}" for name, size in least.mesh.written.items())
    zero = zero_text(highest(least.zero), by_pattern(setting.graph, least.zero))
    where = "rank" if len(least.stages) > least.mesh.pp else "stage"
    nearest = Changes(setting, nothing, smaller).nearest()
    return InfeasibleError(
        f"no plan fits in memory: needs {needs:.1f} GiB per GPU, have {has:.1f} GiB, "
        f"short by {_short(memory['total'] - room)} ({held})",
        where=f"{where} {rank} of the leanest plan found: {mesh}, {least.mesh.microbatches} microbatches, "
        f"zero={zero}, activation checkpointing {name_of(least.activation_checkpoint)}",
        fix=nearest or "no nearby change fits: use a smaller model, or smaller samples",
    )


def _short(num_bytes: int) -> str:
    """In GiB where that says anything."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= _SHOWN_GIB * GIB else format_bytes(num_bytes)


__all__ = ["explain"]
