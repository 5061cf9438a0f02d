"""A lowered template -> which local tensors share memory, and how their elements lie in it.

Views share the memory of what they show, and keep all of it alive. Whether a reshape is a view or a copy follows from
strides, so these are followed through the template: PyTorch itself is asked, on its meta device, for operations whose
results may share or inherit a layout. Everything else makes contiguous results of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod

import torch

from ..capture.graph import Arg, Symbol, TensorType
from ..capture.light_torch import light_meta
from ..sharding.mesh import Axis
from ..sharding.placement import local_type
from ..sharding.program import Compute, Convert, TemplateProgram, Var
from ..sharding.redistribute import Change
from ..sharding.rules import rule_of
from ..sharding.rules.pointwise import pointwise_options
from ..sharding.rules.registry import Call, Operand

_ATTENTION = "aten.scaled_dot_product_attention.default"
KEEPS_VALUE = ""  # the forward of a conversion that changes nothing but the gradient

Shape = tuple[int, ...]
Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A local tensor: the memory it lies in, by the value that made it, and how."""

    root: Var
    type: TensorType
    strides: Strides

    def is_flat(self, apart: int) -> bool:
        """Whether all dims but the last `apart` can be read as one without a copy."""
        sizes = self.type.shape[: len(self.type.shape) - apart]
        lead = [(size, stride) for size, stride in zip(sizes, self.strides, strict=False) if size > 1]
        return all(outer == size * stride for (_, outer), (size, stride) in zip(lead, lead[1:], strict=False))


@dataclass(frozen=True)
class Storages:
    """Every value of a template on one rank. `num_bytes`: of whole memory, by root."""

    tensors: dict[Var, Tensor] = field(default_factory=dict)
    num_bytes: dict[Var, int] = field(default_factory=dict)

    def add(self, made: Var, value: TensorType, strides: Strides | None = None, *, root: Var | None = None) -> None:
        strides = contiguous(value.shape) if strides is None else strides
        self.tensors[made] = Tensor(made if root is None else root, value, strides)
        if root is None:
            self.num_bytes[made] = value.num_bytes

    def root(self, made: Var) -> Var:
        return self.tensors[made].root


def contiguous(shape: Shape) -> Strides:
    """The strides of a new tensor."""
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def storages_of(lowered: TemplateProgram, axes: Sequence[Axis], *, gathers_again: bool) -> Storages:
    """Follow every value of a template. `gathers_again`: a gathered value stands for the part that it is made from."""
    found = Storages()
    for made in (*lowered.inputs, *lowered.tensors):
        found.add(made, local_type(lowered.template.type_of(made.ref), made.layout, axes))
    for step in lowered.steps:
        if isinstance(step, Convert):
            _convert(found, step, gathers_again)
        else:
            _compute(found, step)
    return found


def _convert(found: Storages, step: Convert, gathers_again: bool) -> None:
    source, change = found.tensors[step.source], step.change
    if gathers_again and change.conversion.forward == "all_gather":
        found.add(step.target, change.after, root=source.root)
    elif change.conversion.forward == KEEPS_VALUE:
        found.add(step.target, change.after, source.strides, root=source.root)
    elif shares_memory(change) and source.strides == contiguous(source.type.shape):
        found.add(step.target, change.after, root=source.root)
    else:
        found.add(step.target, change.after)


def shares_memory(change: Change) -> bool:
    """Whether a conversion returns a view: it changes the gradient alone, or takes a run of the first dim."""
    if change.conversion.forward == "[slice]":
        split = change.target
        return split.groups == 1 and prod(change.before.shape[: split.dim]) == 1
    # A mask keeps the value on one rank, and the others hold as many zeros.
    return change.conversion.forward == KEEPS_VALUE


def _compute(found: Storages, step: Compute) -> None:
    operands = [found.tensors[made] for made in step.operands]
    if step.node.op == _ATTENTION and len(step.results) == 1:
        # The dims of the result lie in the order of the queries'. Source: torch 2.13, fused kernels: empty_like(query).
        found.add(step.results[0], step.outputs[0], _in_order(step.outputs[0].shape, operands[0].strides))
        return
    if not _inherits_layout(step):
        for made, value in zip(step.results, step.outputs, strict=True):
            found.add(made, value)
        return
    key = tuple((t.type.dtype, t.type.shape, t.strides) for t in operands)
    for made, value, (owner, strides) in zip(step.results, step.outputs, _layouts(step.call, key), strict=True):
        found.add(made, value, strides, root=None if owner < 0 else operands[owner].root)


def _in_order(shape: Shape, strides: Strides) -> Strides:
    """Strides of a dense tensor whose dims lie in the order of `strides`."""
    order = sorted(range(len(shape)), key=lambda i: -strides[i])
    dense = contiguous(tuple(shape[i] for i in order))
    return tuple(dense[order.index(i)] for i in range(len(shape)))


def _inherits_layout(step: Compute) -> bool:
    if not step.call.target.startswith("aten.") or not step.operands:
        return False
    rule = rule_of(step.node.op)
    if rule is None:
        return False
    if rule.options is pointwise_options:
        return True
    forward = rule.work(step.node, step.operand_types, step.outputs).forward
    return not forward.kernels and not forward.bytes


@lru_cache(maxsize=1 << 14)
def _layouts(call: Call, operands: tuple[tuple[str, Shape, Strides], ...]) -> tuple[tuple[int, Strides], ...]:
    """For every result: the operand whose memory it shares (-1 for none), and its strides."""
    given = [
        torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
        for dtype, shape, strides in operands
    ]
    namespace, name, overload = call.target.split(".")
    function = getattr(getattr(getattr(torch.ops, namespace), name), overload)

    def real(arg: Arg) -> object:
        if isinstance(arg, Operand):
            return given[arg.position]
        if isinstance(arg, tuple):
            return [real(item) for item in arg]
        if isinstance(arg, Symbol):
            return {"training": True, "device": torch.device("meta")}.get(arg.kind) or getattr(torch, arg.name)
        return arg

    with torch.no_grad(), light_meta():
        made = function(*map(real, call.args), **{key: real(arg) for key, arg in call.kwargs})
    owners = {tensor.untyped_storage()._cdata: i for i, tensor in reversed(list(enumerate(given)))}
    results = made if isinstance(made, list | tuple) else (made,)
    return tuple((owners.get(t.untyped_storage()._cdata, -1), tuple(t.stride())) for t in results)
