"""A plan read from a file -> its simulated step, with and without stragglers, and that as a Chrome trace.

Ranks of one stage run alike, so a row stands for all ranks of a pipeline coordinate. What the plan says of a stage is
scheduled as the search does it: microbatches by the schedule's actions, then gradients and optimizer on all ranks at
once. Every time is scaled by what the slowest of many nodes costs, so that without stragglers the step is the plan's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..cost_models.timeline import BACKWARD, FORWARD, Timeline, simulate
from ..cost_models.units import MICROSECOND
from .errors import AutoparError
from .plan import Plan, StagePlan
from .schedules import action_table

SEND, STEP, BUBBLE = "send", "step", "bubble"
_MOST_TIMES = 1000.0  # a rank slower than this is a broken one
KINDS = {FORWARD: "forward", BACKWARD: "backward", "I": "input gradient", "W": "weight gradient"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One bar of the picture. `kind`: "forward", "backward", ..., "send", "step" or "bubble"."""

    name: str
    kind: str
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """`rows`: the slices of each pipeline coordinate, in order; `ranks`: the first and last rank of each."""

    step_seconds: float
    bubble_fraction: float
    rows: tuple[tuple[Slice, ...], ...]
    ranks: tuple[tuple[int, int], ...]


def parse_slow(texts: Sequence[str], world_size: int) -> dict[int, float]:
    """Read "rank=3:1.3": rank 3 takes 1.3 times as long.

    Raises:
        AutoparError: no such form, a rank that there is not or that is given twice, a factor that is none.
    """
    found: dict[int, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        rank, _, factor = value.partition(":")
        try:
            number, times = int(rank), float(factor)
        except ValueError:
            number, times = -1, 0.0
        if name.strip() != "rank" or not 0 < times < float("inf"):
            raise AutoparError(f"cannot read {text!r}", where="--slow", fix="write --slow rank=3:1.3")
        if not 0 <= number < world_size:
            raise AutoparError(f"there is no rank {number}", where="--slow", fix=f"ranks are 0 to {world_size - 1}")
        if number in found:
            raise AutoparError(f"rank {number} is given twice", where="--slow", fix="keep one of the two")
        if times > _MOST_TIMES:
            raise AutoparError(
                f"rank {number} takes {times:g} times as long", where="--slow", fix=f"give at most {_MOST_TIMES:g}"
            )
        found[number] = times
    return found


def simulate_plan(plan: Plan, slow: Mapping[int, float] | None = None) -> SimulatedStep:
    """The step of a plan. `slow`: rank -> factor on what it computes; the ranks of its stage wait for it.

    Raises:
        AutoparError: the plan's schedule cannot run.
    """
    table = action_table(plan.schedule, plan.mesh["pp"], plan.microbatches, plan.stages_per_rank)
    durations = {(s, kind): seconds for s, stage in enumerate(plan.stages) for kind, seconds in _actions(stage).items()}
    sends = [stage.send_seconds for stage in plan.stages[:-1]]
    rows = len(table.by_rank)
    per_row = prod(plan.mesh.values()) // rows
    factors: dict[int, float] = {}
    for rank, factor in (slow or {}).items():
        factors[rank // per_row] = max(factor, factors.get(rank // per_row, 0.0))
    after = [sum(stage.step_seconds for stage in plan.stages if stage.rank == row) for row in range(rows)]
    usual = simulate(table, durations, sends).step_seconds + max(after)
    scale = plan.step_seconds / usual if usual else 1.0
    timeline = simulate(table, durations, sends, slow=factors)
    slowed = [seconds * factors.get(row, 1.0) for row, seconds in enumerate(after)]
    step = timeline.step_seconds + max(slowed)
    busy = sum(timeline.busy_seconds) + sum(slowed)
    return SimulatedStep(
        step_seconds=step * scale,
        bubble_fraction=max(0.0, 1 - busy / (step * rows)) if step else 0.0,
        rows=tuple(_row(timeline, row, sends, slowed[row], step, scale) for row in range(rows)),
        ranks=tuple((row * per_row, (row + 1) * per_row - 1) for row in range(rows)),
    )


def _actions(stage: StagePlan) -> Mapping[str, float]:
    """Seconds by kind of action."""
    return stage.action_seconds or {FORWARD: stage.forward_seconds, BACKWARD: stage.backward_seconds}


def _row(
    timeline: Timeline, row: int, sends: Sequence[float], after: float, step: float, scale: float
) -> tuple[Slice, ...]:
    """Actions and the messages behind them, gradients and optimizer, and the time between."""
    found: list[Slice] = []

    def add(name: str, kind: str, start: float, end: float) -> None:
        if end > start:
            found.append(Slice(name=name, kind=kind, start_seconds=start * scale, end_seconds=end * scale))

    free = 0.0
    for event in timeline.events[row]:
        action, end = event.action, event.end_seconds
        add("wait", BUBBLE, free, event.start_seconds)
        add(str(action), KINDS[action.kind], event.start_seconds, end)
        free = end
        edge = action.stage if action.kind == FORWARD else action.stage - 1
        if action.kind != "W" and 0 <= edge < len(sends):
            to = action.stage + (1 if action.kind == FORWARD else -1)
            add(f"{action} to stage {to}", SEND, end, end + sends[edge])
    add("wait", BUBBLE, free, timeline.step_seconds)
    add("gradients, optimizer", STEP, timeline.step_seconds, timeline.step_seconds + after)
    add("wait", BUBBLE, timeline.step_seconds + after, step)
    return tuple(found)


def chrome_trace(plan: Plan, simulated: SimulatedStep) -> str:
    """The step in the trace event format that chrome://tracing and ui.perfetto.dev open.

    Source: the Trace Event Format document of Chromium: complete events ("X") in microseconds.
    """
    events: list[dict[str, object]] = []
    for row, (slices, (first, last)) in enumerate(zip(simulated.rows, simulated.ranks, strict=True)):
        name = f"rank {first}" if first == last else f"ranks {first} to {last}"
        events.append({"ph": "M", "pid": row, "name": "process_name", "args": {"name": name}})
        for track, title in enumerate(("compute", "messages")):
            events.append({"ph": "M", "pid": row, "tid": track, "name": "thread_name", "args": {"name": title}})
        for item in slices:
            events.append(
                {
                    "ph": "X",
                    "pid": row,
                    "tid": int(item.kind == SEND),
                    "name": item.name,
                    "cat": item.kind,
                    "ts": round(item.start_seconds / MICROSECOND, 3),
                    "dur": round((item.end_seconds - item.start_seconds) / MICROSECOND, 3),
                }
            )
    told = {"step_seconds": simulated.step_seconds, "schedule": plan.schedule, "microbatches": plan.microbatches}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": told}) + "\n"
