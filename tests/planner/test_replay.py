"""A plan back to its request: pins are read as they were written."""

from __future__ import annotations

import pytest
from autopar.planner.errors import AutoparError
from autopar.planner.replay import parse_mesh


def test_mesh() -> None:
    assert parse_mesh("dp=2, tp=4", where="--mesh") == {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "cannot read ''"),
        ("dp", "cannot read 'dp'"),
        ("xp=2", "no mesh axis 'xp'"),
        ("dp=2,dp=2", "given twice"),
        ("dp=0", "dp=0 is no size"),
        ("dp=-1", "no size"),
        ("dp=two", "no size"),
        ("dp=\u0662", "no size"),
    ],
)
def test_bad_mesh(text: str, what: str) -> None:
    with pytest.raises(AutoparError, match=what):
        parse_mesh(text, where="--mesh")
