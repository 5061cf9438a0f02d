"""Pipeline schedules: one file each, found by walking this folder."""

from .registry import (
    Alive,
    Schedule,
    action_table,
    alive_at_most,
    get_schedule,
    in_flight,
    kept_at_once,
    least_passes,
    possible_counts,
    schedule_names,
    stages_by_rank,
)

__all__ = [
    "Alive", "Schedule", "action_table", "alive_at_most", "get_schedule", "in_flight", "kept_at_once", "least_passes",
    "possible_counts", "schedule_names", "stages_by_rank",
]  # fmt: skip
