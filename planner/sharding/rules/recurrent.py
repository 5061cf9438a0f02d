"""LSTM, GRU and RNN as one operation: samples are split, nothing else. Dropout between layers draws from a seed."""

from __future__ import annotations

from collections.abc import Mapping

from ....cost_models.work import Gemm, Pass, Work
from ...capture.graph import ITEM_BYTES, Arg, Node
from ...capture.random_ops import RECURRENT, is_random
from .factors import factor_options
from .registry import Call, Labels, LocalTypes, Operand, OpRule, Option, Saved, register, same_call
from .schema import arguments, seed_over

_SCHEMA: Mapping[str, Arg] = dict.fromkeys(
    ("input", "hx", "params", "has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
)
_VALUES_KEPT = {"aten.lstm.input": 6, "aten.gru.input": 5}  # gates and states, for each value of a hidden state
_SAMPLES = "b"


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    given = arguments(node, _SCHEMA)
    sequence = [_SAMPLES, "", ""] if given["batch_first"] else ["", _SAMPLES, ""]
    state = ["", _SAMPLES, ""]
    states = 1 if isinstance(given["hx"], Operand) else 2
    weights = [[""] * len(value.shape) for value in operands[1 + states :]]
    named = [sequence, *[state] * states, *weights]
    return factor_options(named, [sequence, *[state] * states], operands, node.outputs)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    if not is_random(node.op, node.args, node.kwargs):
        return same_call(node, labels, outputs, sizes)
    args = tuple(arguments(node, _SCHEMA).values())
    kind = node.op.split(".")[1]
    return Call(target="seeded_recurrent", args=(*args, kind, seed_over(labels, _SAMPLES)))


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """One product of each weight for all steps, and of recurrent ones a kernel for every step, with one for the gates.

    Backward takes two products for each, and as many kernels.
    """
    given = arguments(node, _SCHEMA)
    x = operands[0]
    steps = x.shape[1 if given["batch_first"] else 0]
    rows = x.shape[0] * x.shape[1]
    weights = [value for value in operands[1:] if len(value.shape) == 2]
    gemms = tuple(Gemm(rows, value.shape[0], value.shape[1]) for value in weights)
    traffic = sum(rows * sum(value.shape) * ITEM_BYTES[x.dtype] + value.num_bytes for value in weights)
    kernels = len(weights) * steps
    forward = Pass(gemms=gemms, bytes=traffic, kernels=kernels)
    twice = tuple(each for g in gemms for each in (Gemm(g.m, g.k, g.n), Gemm(g.k, g.n, g.m)))
    backward = Pass(gemms=twice, bytes=2 * traffic, kernels=2 * kernels)
    return Work(forward=forward, backward=backward, dtype=x.dtype)


def _saved(node: Node) -> Saved:
    """Operands, outputs, and gates and states of every layer, direction and step."""
    given, out = arguments(node, _SCHEMA), node.output
    values = int(str(given["num_layers"])) * out.numel * _VALUES_KEPT.get(node.op, 2)
    return Saved(operands=tuple(range(len(node.operands))), outputs=(0,), extra_bytes=values * ITEM_BYTES[out.dtype])


register(
    OpRule(
        ops=RECURRENT,
        options=_options,
        work=_work,
        saved=_saved,
        localise=_localise,
        is_random=True,
        overwrites_products=True,
    )
)
