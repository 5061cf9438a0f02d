"""autopar: planner/capture."""
