"""Pipeline schedules: one file each, found by walking this folder."""

from .registry import (
    Schedule,
    action_table,
    get_schedule,
    in_flight,
    kept_at_once,
    least_passes,
    possible_counts,
    schedule_names,
    stages_by_rank,
)

__all__ = [
    "Schedule", "action_table", "get_schedule", "in_flight", "kept_at_once", "least_passes", "possible_counts",
    "schedule_names", "stages_by_rank",
]  # fmt: skip
