"""autopar: planner/schedules."""
