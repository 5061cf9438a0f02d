"""autopar: compiler."""
