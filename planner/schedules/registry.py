"""What a pipeline schedule declares, and the registry that finds schedules by walking this folder."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from operator import ge
from typing import Literal, NamedTuple

from ...cost_models.errors import AutoparError
from ...cost_models.timeline import FORWARD, INPUT_GRADIENT, Action, ActionTable

# Warm-up is over, and as much is kept as ever will be, after so many microbatches per rank (all schedules but GPipe,
# whose `in_flight` says so).
_WARM_ROUNDS = 2

Actions = tuple[tuple[Action, ...], ...]


class Alive(NamedTuple):
    """Microbatches whose activations a stage keeps: those that wait for a backward, and those that wait for the second
    part of theirs (W) after the first (I)."""

    untouched: int
    halfway: int = 0

    @property
    def total(self) -> int:
        return self.untouched + self.halfway


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One pipeline schedule; a file of this folder that has it as `SCHEDULE`.

    torch_class: its class in torch.distributed.pipelining, "" where no pipeline runs.
    actions: (ranks, stages per rank, microbatches) -> the actions of every rank, in order.
    refuse: (ranks, stages per rank, microbatches) -> why it cannot run so, "" if it can.
    stages_per_rank: the numbers that a search tries; a pin may ask for others that `refuse` allows.
    searched_from: microbatches from which a search tries it; a pin may ask for it with fewer.
    placement: which rank holds stage s of S on p ranks: "loop": s modulo p; "v": there and back, rank 0 has 0 and S-1.
    splits_backward: the gradients of a stage's inputs and of its weights are actions of their own, I and W.
    in_flight: (stage, ranks, microbatches) -> microbatches whose activations are alive at once, with one stage per
    rank; None: read off the actions.
    least_passes: (ranks, microbatches) -> the step at least, whatever the stages, with one stage per rank, over what
    one microbatch takes through the whole model, there and back; None: no more than that ranks share all of the work.
    """

    name: str
    description: str
    torch_class: str
    actions: Callable[[int, int, int], Actions]
    refuse: Callable[[int, int, int], str]
    stages_per_rank: tuple[int, ...] = (1,)
    searched_from: int = 1
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False
    in_flight: Callable[[int, int, int], int] | None = None
    least_passes: Callable[[int, int], float] | None = None

    @property
    def is_multi_stage(self) -> bool:
        """Whether its class takes a list of stages, and runs actions that were listed ahead."""
        return self.stages_per_rank != (1,)

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that holds a stage."""
        there, position = stage // ranks % 2, stage % ranks
        return ranks - 1 - position if self.placement == "v" and there else position

    def stages_of(self, rank: int, ranks: int, num_stages: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage in range(num_stages) if self.rank_of(stage, ranks) == rank)


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
def action_table(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> ActionTable:
    """The checked actions of a schedule, cached.

    Raises:
        AutoparError: the schedule cannot run with these numbers.
    """
    return ActionTable(by_rank=_actions(name, ranks, microbatches, stages_per_rank))


def _actions(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Actions:
    schedule = get_schedule(name)
    if reason := schedule.refuse(ranks, stages_per_rank, microbatches):
        raise AutoparError(f"schedule {name} cannot run: {reason}", fix="choose another schedule or microbatch size")
    return schedule.actions(ranks, stages_per_rank, microbatches)


@cache
def stages_by_rank(name: str, ranks: int, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """The stages of every rank, in the order of the model."""
    schedule = get_schedule(name)
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage in range(num_stages):
        found[schedule.rank_of(stage, ranks)].append(stage)
    return tuple(map(tuple, found))


@cache
def possible_counts(name: str, ranks: int, stages_per_rank: int = 1) -> tuple[int, int] | None:
    """(least, step) of the numbers of microbatches that a schedule runs; None where there are no two of them."""
    refuse = get_schedule(name).refuse
    found = [count for count in range(1, 2 * ranks + 2) if not refuse(ranks, stages_per_rank, count)]
    return (found[0], found[1] - found[0]) if len(found) > 1 else None


def kept_at_once(
    name: str, ranks: int, microbatches: int, stages_per_rank: int = 1
) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    """By rank: of how many microbatches its stages, in the order of the model, keep activations at the same time.

    All combinations of which no other has as many on every stage, nor as many of them halfway, which takes no less; the
    one with most in all comes first. A first stage has none halfway: PyTorch leaves its whole backward to W.
    """
    schedule = get_schedule(name)
    if schedule.in_flight is not None and stages_per_rank == 1:
        return tuple(((Alive(schedule.in_flight(rank, ranks, microbatches)),),) for rank in range(ranks))
    return _kept_at_once(name, ranks, min(microbatches, _WARM_ROUNDS * ranks), stages_per_rank)


@cache
def _kept_at_once(
    name: str, ranks: int, microbatches: int, stages_per_rank: int
) -> tuple[tuple[tuple[Alive, ...], ...], ...]:
    placed = stages_by_rank(name, ranks, ranks * stages_per_rank)
    actions = _actions(name, ranks, microbatches, stages_per_rank)
    return tuple(_fullest(of_rank, mine) for mine, of_rank in zip(placed, actions, strict=True))


def _fullest(actions: tuple[Action, ...], stages: tuple[int, ...]) -> tuple[tuple[Alive, ...], ...]:
    alive = dict.fromkeys(stages, Alive(0))
    seen: dict[tuple[Alive, ...], None] = {}
    grows = False
    for action in actions:
        untouched, halfway = alive[action.stage]
        if action.kind == INPUT_GRADIENT and not action.stage:
            continue
        if action.kind in (FORWARD, INPUT_GRADIENT):
            is_forward = action.kind == FORWARD
            alive[action.stage] = Alive(untouched + 1, halfway) if is_forward else Alive(untouched - 1, halfway + 1)
            grows = True
            continue
        if grows:
            seen[tuple(alive.values())] = None
        alive[action.stage] = Alive(untouched, halfway - 1) if halfway else Alive(untouched - 1)
        grows = False
    # What holds another one comes before it, and one of the fullest holds all that is held at all.
    fullest: dict[tuple[Alive, ...], tuple[int, ...]] = {}
    for one in sorted(seen, key=_most_first):
        sizes = (*(each.total for each in one), *(each.halfway for each in one))
        if not any(all(map(ge, full, sizes)) for full in fullest.values()):
            fullest[one] = sizes
    return tuple(fullest)


def _most_first(one: tuple[Alive, ...]) -> tuple[object, ...]:
    totals = [each.total for each in one]
    return -sum(totals), totals, one


def least_passes(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """A step at least, however uneven its stages are, over what one microbatch takes through the whole model, there and
    back."""
    closed_form = get_schedule(name).least_passes if stages_per_rank == 1 else None
    return microbatches / ranks if closed_form is None else closed_form(ranks, microbatches)


@cache
def alive_at_most(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[Alive, ...]:
    """By stage: the microbatches whose activations are alive when its rank keeps most of them."""
    found = [Alive(0)] * (ranks * stages_per_rank)
    placed = stages_by_rank(name, ranks, len(found))
    for mine, fullest in zip(placed, kept_at_once(name, ranks, microbatches, stages_per_rank), strict=True):
        for stage, count in zip(mine, fullest[0], strict=True):
            found[stage] = count
    return tuple(found)


@cache
def in_flight(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """How many that are, by stage."""
    return tuple(alive.total for alive in alive_at_most(name, ranks, microbatches, stages_per_rank))


__all__ = [
    "Actions", "Alive", "Schedule", "action_table", "alive_at_most", "get_schedule", "in_flight", "kept_at_once",
    "least_passes", "possible_counts", "schedule_names", "stages_by_rank",
]  # fmt: skip
