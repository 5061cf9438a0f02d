"""autopar: compiler/exporters."""
