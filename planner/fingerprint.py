"""A captured step -> the digest by which a plan knows it again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from .capture.graph import ModelGraph


def fingerprint(graph: ModelGraph, arguments: Mapping[str, object]) -> str:
    """A digest of everything about the captured step that a plan depends on; where the source lies does not count."""
    parts: list[object] = [graph.name, graph.batch_size, graph.inputs, graph.units, graph.loss, graph.is_random]
    parts.append(sorted((name, info) for name, info in graph.tensors.items()))
    for template in graph.templates:
        parts.append((template.name, template.pattern, template.outputs, template.is_module, template.buffer_updates))
        parts.extend((n.name, n.kind, n.op, n.args, n.kwargs, n.outputs, n.constant) for n in template.nodes)
    parts.append(sorted((key, repr(_as_in_json(value))) for key, value in arguments.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _as_in_json(value: object) -> object:
    """An argument as it is read back from plan.json."""
    if isinstance(value, list | tuple):
        return [_as_in_json(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
