"""Capture whose time does not grow with depth: operations are recorded, repeated blocks once."""
