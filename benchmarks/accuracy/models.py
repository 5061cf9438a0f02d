"""The sample models at the sizes of a row: captured once per shape, then made deeper and wider in batch as data.

A model is captured with two blocks and four samples; `deepened` repeats the block that the capture folded and
`with_batch` scales the batch dim of every value. Both are exact: the graph holds a block once and a type per value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from autopar.planner.capture import capture_model
from autopar.planner.capture.graph import Kind, ModelGraph, ParameterInfo, Template, TensorType, Unit, Value
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import Pair
from autopar.planner.sharding.program import Placements, node_layouts

_MODELS = Path(__file__).resolve().parents[2] / "sample_models"
CAPTURED_LAYERS = 2
CAPTURED_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A sample model: its file and the arguments of its `build`, without the number of layers."""

    file: str
    arguments: tuple[tuple[str, object], ...]


@cache
def captured(shape: Shape) -> ModelGraph:
    """The training step of two blocks on four samples."""
    arguments: Mapping[str, object] = {**dict(shape.arguments), "num_layers": CAPTURED_LAYERS}
    return capture_model(
        _MODELS / shape.file, name="build", arguments=arguments, batch_size=CAPTURED_BATCH, guarded=False
    ).graph


def deepened(graph: ModelGraph, layers: int) -> ModelGraph:
    """The same model with `layers` copies of its repeated block."""
    counts = graph.counts()
    repeated = next(t for t, count in enumerate(counts) if count == CAPTURED_LAYERS and graph.templates[t].is_module)
    first = next(i for i, unit in enumerate(graph.units) if unit.template == repeated)
    head, tail = graph.units[: first + 1], graph.units[first + 2 :]
    pattern = graph.units[first + 1]
    more = layers - CAPTURED_LAYERS

    def block(index: int) -> Unit:
        fqn = _renamed(pattern.fqn, pattern.fqn, index)
        inputs = tuple(replace(v, unit=first + index - 1) if v.unit == first else v for v in pattern.inputs)
        tensors = tuple((name, _renamed(held, pattern.fqn, index)) for name, held in pattern.tensors)
        return replace(pattern, fqn=fqn, inputs=inputs, tensors=tensors)

    def shifted(value: Value) -> Value:
        return replace(value, unit=value.unit + more) if value.unit > first else value

    units = (*head, *(block(i) for i in range(1, layers)))
    units += tuple(replace(unit, inputs=tuple(map(shifted, unit.inputs))) for unit in tail)
    tensors: dict[str, ParameterInfo] = {}
    for fqn, info in graph.tensors.items():
        if fqn.startswith(pattern.fqn + "."):
            tensors.update({_renamed(fqn, pattern.fqn, i): info for i in range(1, layers)})
        else:
            tensors[fqn] = info
    return replace(graph, units=units, tensors=tensors, loss=shifted(graph.loss))


def _renamed(fqn: str, block: str, index: int) -> str:
    parent = block.rpartition(".")[0]
    return f"{parent}.{index}{fqn[len(block) :]}"


def with_batch(graph: ModelGraph, placements: Placements, batch_size: int) -> ModelGraph:
    """The same step on `batch_size` samples. `placements` say under "dp" which dim of a value holds the samples."""
    axes = (Axis("dp", 2),)

    def scaled(value: TensorType, pair: Pair | None) -> TensorType:
        if pair is None or not pair.is_split:
            return value
        size = value.shape[pair.dim] * batch_size // graph.batch_size
        return replace(value, shape=(*value.shape[: pair.dim], size, *value.shape[pair.dim + 1 :]))

    def template(old: Template, index: int) -> Template:
        nodes = []
        for node in old.nodes:
            _, makes = node_layouts(old, node, placements[index], axes)
            if node.kind is Kind.PARAMETER:
                nodes.append(node)
                continue
            outputs = tuple(scaled(v, layout.get("dp")) for v, layout in zip(node.outputs, makes, strict=True))
            nodes.append(replace(node, outputs=outputs))
        return replace(old, nodes=tuple(nodes))

    templates = tuple(template(old, index) for index, old in enumerate(graph.templates))
    inputs = []
    for given in graph.inputs:
        if given.batch_dim is None:
            inputs.append(given)
            continue
        shape = list(given.type.shape)
        shape[given.batch_dim] = batch_size
        inputs.append(replace(given, type=replace(given.type, shape=tuple(shape))))
    return replace(graph, batch_size=batch_size, templates=templates, inputs=tuple(inputs))
