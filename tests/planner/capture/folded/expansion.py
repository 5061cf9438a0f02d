"""The same step captured by recording and by torch.export alone: every operation of every unit must agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopar.planner.capture import capture_model
from autopar.planner.fingerprint import fingerprint


def assert_recorded_equals_exported(path: Path, **options: object) -> tuple[str, ...]:
    """Compare templates, units, names, types, arguments and lines; the notes of the recording."""
    recorded = capture_model(path, guarded=False, **options).graph
    exported = capture_model(path, guarded=False, is_exact=True, **options).graph
    ours, theirs = replace(recorded, notes=()), replace(exported, notes=())
    for one, other in zip(ours.templates, theirs.templates, strict=True):
        assert one == other
    assert ours == theirs
    assert fingerprint(recorded, {}) == fingerprint(exported, {})
    return recorded.notes
