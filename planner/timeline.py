"""A plan read from a file -> its simulated step, with and without stragglers, and that as a Chrome trace.

Ranks of one stage run alike, so a row stands for all ranks of a pipeline coordinate, or for those of one dp rank where
each has its own share of the batch. What the plan says of a stage is
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
    """`rows`: the slices of each pipeline coordinate (and dp rank, where these differ), in order; `ranks`: the first
    and last rank of each."""

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
    durations = {(s, kind): seconds for s, stage in enumerate(plan.stages) for kind, seconds in _actions(stage).items()}
    sends = [stage.send_seconds for stage in plan.stages[:-1]]
    rows, num_dp = plan.mesh["pp"], len(plan.batch_shares) or 1
    each = prod(plan.mesh.values()) // (rows * num_dp)
    after = [sum(stage.step_seconds for stage in plan.stages if stage.rank == row) for row in range(rows)]

    def course(slow: Mapping[int, float]) -> list[tuple[Timeline, list[float]]]:
        """The microbatches of each dp rank that has its own share of the batch, and what follows, by row."""
        found = []
        for d in range(num_dp):
            count = plan.batch_shares[d] if plan.batch_shares else plan.microbatches
            table = action_table(plan.schedule, rows, count, plan.stages_per_rank)
            factors = {}
            for row in range(rows):
                first = (row * num_dp + d) * each
                pace = plan.dp_paces[d][row] / plan.dp_paces[0][row] if plan.dp_paces else 1.0
                given = [factor for rank, factor in slow.items() if first <= rank < first + each]
                factors[row] = pace * max(given, default=1.0)
            timeline = simulate(table, durations, sends, slow=factors)
            found.append((timeline, [seconds * factors[row] for row, seconds in enumerate(after)]))
        return found

    def end(courses: Sequence[tuple[Timeline, list[float]]]) -> tuple[float, float]:
        """When all dp ranks are through their microbatches, and when the step ends."""
        through = max(timeline.step_seconds for timeline, _ in courses)
        return through, through + max(seconds for _, later in courses for seconds in later)

    usual = end(course({}))[1]
    scale = plan.step_seconds / usual if usual else 1.0
    courses = course(slow or {})
    through, step = end(courses)
    busy = sum(sum(timeline.busy_seconds) + sum(later) for timeline, later in courses)
    shown = [(row, d) for row in range(rows) for d in range(num_dp)]
    return SimulatedStep(
        step_seconds=step * scale,
        bubble_fraction=max(0.0, 1 - busy / (step * len(shown))) if step else 0.0,
        rows=tuple(_row(courses[d][0], row, sends, courses[d][1][row], through, step, scale) for row, d in shown),
        ranks=tuple((index * each, (index + 1) * each - 1) for index in range(len(shown))),
    )


def _actions(stage: StagePlan) -> Mapping[str, float]:
    """Seconds by kind of action."""
    return stage.action_seconds or {FORWARD: stage.forward_seconds, BACKWARD: stage.backward_seconds}


def _row(
    timeline: Timeline, row: int, sends: Sequence[float], after: float, through: float, step: float, scale: float
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
    add("wait", BUBBLE, free, through)
    add("gradients, optimizer", STEP, through, through + after)
    add("wait", BUBBLE, through + after, step)
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
