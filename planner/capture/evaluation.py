"""Runs a ModelGraph unsharded with torch: the meaning of the graph, and what tests compare with the user's module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import Arg, Kind, ModelGraph, Node, Ref, Symbol, Template, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`buffers` are the values after the step of those that changed."""

    loss: Tensor
    buffers: Mapping[str, Tensor]


def evaluate(
    graph: ModelGraph, tensors: Mapping[str, Tensor], inputs: Mapping[str, Tensor], *, training: bool = True
) -> Evaluation:
    """Compute the loss from parameters and buffers by canonical FQN and inputs by name; autograd sees all of it."""
    values: dict[Value, Tensor] = {}
    buffers = {fqn: tensors[fqn].clone() for fqn, info in graph.tensors.items() if info.is_buffer}
    updates: dict[str, Tensor] = {}
    for number, unit in enumerate(graph.units):
        template = graph.templates[unit.template]
        given = [inputs[item.name] for item in graph.inputs] if number == 0 else [values[v] for v in unit.inputs]
        named = dict(unit.tensors)
        local = {name: buffers[fqn] if fqn in buffers else tensors[fqn] for name, fqn in named.items()}
        results = run_template(template, given, local, training=training)
        for index, ref in enumerate(template.outputs):
            values[Value(number, index)] = results[ref]
        if training:
            updates.update({named[name]: results[ref].detach() for name, ref in template.buffer_updates})
    moved = {fqn: value for fqn, value in buffers.items() if not _equal(value, tensors[fqn])}
    return Evaluation(loss=values[graph.loss], buffers={**moved, **updates})


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(other.detach())))


def run_template(
    template: Template, inputs: list[Tensor], tensors: Mapping[str, Tensor], *, training: bool = True
) -> dict[Ref, Tensor]:
    """Every value of one unit. Batch norm updates the buffers it is given in place."""
    found: dict[Ref, Tensor] = {}
    remaining = iter(inputs)
    for node in template.nodes:
        if node.kind is Kind.INPUT:
            found[Ref(node.name)] = next(remaining)
        elif node.kind is Kind.CONSTANT:
            found[Ref(node.name)] = torch.tensor(node.constant, dtype=getattr(torch, node.output.dtype)).reshape(
                node.output.shape
            )
        elif node.kind is Kind.OP:
            result = run_node(node, found, training=training)
            for index, value in enumerate(result if isinstance(result, list | tuple) else (result,)):
                found[Ref(node.name, index)] = value
        else:
            found[Ref(node.name)] = tensors[node.name]
    return found


def run_node(node: Node, values: Mapping[Ref, Tensor], *, training: bool = True) -> Tensor | tuple[Tensor, ...]:
    """One operation on real tensors."""
    namespace, name, overload = node.op.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    args = [_real(arg, values, training) for arg in node.args]
    if not training and node.op == "aten.scaled_dot_product_attention.default" and len(args) > 4:
        args[4] = 0.0
    return function(*args, **{key: _real(arg, values, training) for key, arg in node.kwargs})


def _real(arg: Arg, values: Mapping[Ref, Tensor], training: bool) -> object:
    if isinstance(arg, Ref):
        return values[arg]
    if isinstance(arg, tuple):
        return [_real(item, values, training) for item in arg]
    if isinstance(arg, Symbol):
        if arg.kind == "training":
            return training
        if arg.kind == "device":
            return torch.device("cpu")
        return getattr(torch, arg.name)
    return arg
