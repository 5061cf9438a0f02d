"""The small languages inside options."""

from __future__ import annotations

from pathlib import Path

import pytest
from autopar.cli.options import default_folder, parse_assignments
from autopar.planner.errors import AutoparError


def test_assignments() -> None:
    read = parse_assignments(["preset=tiny", "ids=int64[B,1024]<5", "expr=a=b", "empty="], option="--set")
    assert read == {"preset": "tiny", "ids": "int64[B,1024]<5", "expr": "a=b", "empty": ""}


@pytest.mark.parametrize(
    ("items", "what"), [(["preset"], "cannot read"), (["=3"], "cannot read"), (["a=1", "a=2"], "given twice")]
)
def test_bad_assignments(items: list[str], what: str) -> None:
    with pytest.raises(AutoparError, match=what) as caught:
        parse_assignments(items, option="--set")
    assert "--set" in caught.value.where + caught.value.fix


@pytest.mark.parametrize("text", ["gpt.py", "models/gpt.py", "models/gpt.py:build", "gpt.py:build"])
def test_default_folder(text: str) -> None:
    assert default_folder(text) == Path("gpt-autopar")
