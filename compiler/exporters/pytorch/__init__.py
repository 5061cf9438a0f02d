"""PyTorch as the target: `sharded_model.py` and the `collectives.py` that it imports."""

from __future__ import annotations

from ...lower import LoweredModel
from .model import Provenance, render_model
from .options import Options, options_of
from .runtime_source import render_collectives, runtime


def render_files(model: LoweredModel, options: Options, provenance: Provenance) -> dict[str, str]:
    """File name -> text. A plan that needs no runtime function has no collectives.py."""
    text, calls = render_model(model, options, provenance, runtime().functions)
    files = {"sharded_model.py": text}
    if calls:
        files["collectives.py"] = render_collectives(calls)
    return files


__all__ = ["Options", "Provenance", "options_of", "render_files"]
