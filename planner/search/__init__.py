"""autopar: planner/search."""
