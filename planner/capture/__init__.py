"""Model file -> folded graph. Names are loaded on first use, so that reading a graph does not import torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .capture import CapturedModel, capture_model
    from .evaluation import evaluate
    from .model_file import LoadedModel, load_model_file
    from .step import run_step, sample_inputs

_HOMES = {
    "CapturedModel": ".capture",
    "capture_model": ".capture",
    "evaluate": ".evaluation",
    "LoadedModel": ".model_file",
    "load_model_file": ".model_file",
    "run_step": ".step",
    "sample_inputs": ".step",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CapturedModel",
    "LoadedModel",
    "capture_model",
    "evaluate",
    "load_model_file",
    "run_step",
    "sample_inputs",
]
