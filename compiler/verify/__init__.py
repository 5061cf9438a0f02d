"""Runs the emitted code on CPU ranks against the user's module: every value and every collective of a step."""

from .check import verify
from .report import CollectiveMismatch, RankFailure, ValueCheck, VerifyReport

__all__ = ["CollectiveMismatch", "RankFailure", "ValueCheck", "VerifyReport", "verify"]
