"""Errors say what, where and how to fix it, and carry the exit code."""

from __future__ import annotations

import pickle

import pytest
from autopar.planner.errors import AutoparError, CheckFailed, InfeasibleError, UnsupportedModel


def test_text() -> None:
    assert str(AutoparError("what", where="there", fix="this")) == "what\n  where: there\n  fix: this"
    assert str(AutoparError("what")) == "what"


@pytest.mark.parametrize(
    ("error", "code"), [(AutoparError, 2), (InfeasibleError, 3), (UnsupportedModel, 4), (CheckFailed, 5)]
)
def test_codes(error: type[AutoparError], code: int) -> None:
    assert error("what").exit_code == code
    assert issubclass(error, AutoparError)


def test_errors_cross_processes() -> None:
    """Forked ranks hand their error to the parent."""
    error = pickle.loads(pickle.dumps(InfeasibleError("what", where="there", fix="this")))
    assert (type(error), error.what, error.where, error.fix) == (InfeasibleError, "what", "there", "this")
