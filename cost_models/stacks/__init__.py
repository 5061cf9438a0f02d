"""Software-stack profiles: one TOML file each, of enumerated choices only."""

from .profile import CHOICES, EAGER, Stack, load_stack, stack_names

__all__ = ["CHOICES", "EAGER", "Stack", "load_stack", "stack_names"]
