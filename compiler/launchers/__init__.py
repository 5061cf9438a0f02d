"""autopar: compiler/launchers."""
