"""autopar: cli/commands."""
