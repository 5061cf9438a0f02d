"""autopar: planner."""
