"""What a pipeline schedule declares, and the registry that finds schedules by walking this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache

from ...cost_models.errors import AutoparError
from ...cost_models.timeline import Action, ActionTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule; a file of this folder that has it as `SCHEDULE`.

    torch_class: its class in torch.distributed.pipelining, "" where no pipeline runs.
    actions: (stages, microbatches) -> the actions of every rank, in order.
    in_flight: (stage, stages, microbatches) -> microbatches whose activations are alive at once.
    refuse: (stages, microbatches) -> why it cannot run so, "" if it can.
    """

    name: str
    description: str
    torch_class: str
    actions: Callable[[int, int], tuple[tuple[Action, ...], ...]]
    in_flight: Callable[[int, int, int], int]
    refuse: Callable[[int, int], str]


@cache
def _schedules() -> dict[str, Schedule]:
    package = __name__.rpartition(".")[0]
    found: dict[str, Schedule] = {}
    for module in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda m: m.name):
        if module.name == "registry":
            continue
        schedule = importlib.import_module(f"{package}.{module.name}").SCHEDULE
        if schedule.name in found:
            raise ValueError(f"two schedules are called {schedule.name}")
        found[schedule.name] = schedule
    return found


def schedule_names() -> tuple[str, ...]:
    """Every schedule, sorted."""
    return tuple(sorted(_schedules()))


def get_schedule(name: str) -> Schedule:
    """The schedule of this name.

    Raises:
        AutoparError: there is none; the valid names are listed.
    """
    schedules = _schedules()
    if name not in schedules:
        close = get_close_matches(name, schedules, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of: {', '.join(sorted(schedules))}"
        raise AutoparError(f"there is no schedule {name!r}", fix=hint)
    return schedules[name]


@cache
def action_table(name: str, stages: int, microbatches: int) -> ActionTable:
    """The checked actions of a schedule, cached.

    Raises:
        AutoparError: the schedule cannot run with these numbers.
    """
    schedule = get_schedule(name)
    if reason := schedule.refuse(stages, microbatches):
        raise AutoparError(f"schedule {name} cannot run: {reason}", fix="choose another schedule or microbatch size")
    return ActionTable(by_rank=schedule.actions(stages, microbatches))
