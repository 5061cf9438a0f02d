"""Softmax and log-softmax: other dims are free; a split of their own dim reduces maxima and sums inside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....cost_models.work import Pass, Work
from ...capture.graph import Arg, Node
from ..redistribute import CollectiveUse
from .factors import factor_options, numbered_dims, saves_output
from .registry import Call, Labels, LocalTypes, OpRule, Option, plain_label, register, same_call
from .schema import arguments, axes_of, handles

SCHEMA: Mapping[str, Arg] = {"input": None, "dim": -1, "dtype": None}
TARGETS = {
    "aten.softmax.int": "softmax_split",
    "aten._softmax.default": "softmax_split",
    "aten.log_softmax.int": "log_softmax_split",
    "aten._log_softmax.default": "log_softmax_split",
}


def _own_label(node: Node) -> str:
    return f"d{int(arguments(node, SCHEMA)['dim']) % max(len(node.output.shape), 1)}"  # type: ignore[call-overload]


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    names = numbered_dims(node.output.shape)
    own = _own_label(node)
    found = factor_options([names], [names], operands, node.outputs)
    return tuple(replace(option, runs_collectives=option.label == own) for option in found)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    axes = axes_of(labels, _own_label(node))
    if not axes:
        return same_call(node, labels, outputs, sizes)
    given = arguments(node, SCHEMA)
    dtype = None if isinstance(given["dtype"], bool) else given["dtype"]
    return Call(target=TARGETS[node.op], args=(given["input"], given["dim"], handles(axes), dtype))


def _collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    own = _own_label(node)
    if plain_label(label) != own:
        return ()
    num_bytes = outputs[0].num_bytes // outputs[0].shape[int(own[1:])]
    phases = ("forward", "forward", "backward") if operands[0].requires_grad else ("forward", "forward")
    return tuple(
        CollectiveUse(op="all_reduce", axis=axis, num_bytes=num_bytes, phase=phase, dtype=outputs[0].dtype)
        for phase in phases
    )


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    x, y = operands[0], outputs[0]
    backward = Pass(flops=4 * y.numel, bytes=2 * y.num_bytes + x.num_bytes, kernels=1) if x.requires_grad else Pass()
    forward = Pass(flops=5 * y.numel, bytes=x.num_bytes + y.num_bytes, kernels=1, transcendentals=y.numel)
    return Work(forward=forward, backward=backward, dtype=y.dtype)


register(
    OpRule(
        ops=tuple(TARGETS),
        options=_options,
        work=_work,
        saved=saves_output,
        collectives=_collectives,
        localise=_localise,
    )
)
