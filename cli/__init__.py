"""autopar: cli."""
