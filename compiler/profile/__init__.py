"""Measures a machine and writes what it found as a cluster file."""

from .profile import Profiled, profile_machine

__all__ = ["Profiled", "profile_machine"]
