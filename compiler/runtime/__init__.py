"""autopar: compiler/runtime."""
