"""autopar: compiler/exporters/pytorch."""
