"""autopar: planner/sharding."""
