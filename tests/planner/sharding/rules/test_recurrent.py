"""LSTM, GRU and RNN: samples are split exactly, and dropout between layers has a seed."""

from __future__ import annotations

import pytest
import torch
from autopar.cost_models.work import Gemm
from autopar.planner.sharding.rules import SeedRef, options_of, rule_of
from harness import Case, case, check, node_of, randn


def recurrent(
    kind: str, *, batch_first: bool = True, layers: int = 2, dropout: float = 0.0, training: bool = True
) -> Case:
    """4 samples of 3 steps of 8 values, two directions."""
    module = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}.get(kind, torch.nn.RNN)
    made = module(8, 8, layers, bidirectional=True, dtype=torch.float64)
    weights = tuple(randn(*p.shape, seed=i) * 0.3 for i, p in enumerate(made.parameters()))
    state = randn(2 * layers, 4, 8)
    states = (state, randn(2 * layers, 4, 8, seed=1)) if kind == "lstm" else state
    x = randn(4, 3, 8) if batch_first else randn(3, 4, 8)
    return case(
        f"aten.{kind}.input", x, states, weights, True, layers, dropout, training, True, batch_first, labels=("b",)
    )


@pytest.mark.slow
@pytest.mark.gloo
def test_samples_are_split_exactly() -> None:
    cases = [recurrent(kind) for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
    assert check([*cases, recurrent("lstm", batch_first=False), recurrent("gru", layers=1)]) > 20


def test_dropout_between_layers_draws_from_a_seed() -> None:
    node, _ = node_of(recurrent("lstm", dropout=0.5))
    call = rule_of(node.op).localise(node, {"dp": "b", "microbatch": "b", "tp": "none"}, node.outputs, {})
    assert (call.target, call.args[-2:]) == ("seeded_recurrent", ("lstm", SeedRef(("dp",))))
    for still in (recurrent("lstm", dropout=0.5, training=False), recurrent("lstm")):
        node, _ = node_of(still)
        assert rule_of(node.op).localise(node, {"dp": "b"}, node.outputs, {"dp": 2}).target == "aten.lstm.input"


def test_only_samples_are_split() -> None:
    node, operands = node_of(recurrent("gru"))
    assert {option.label for option in options_of(node, operands)} == {"none", "grad", "b"}


def test_work_is_a_product_of_every_weight() -> None:
    node, operands = node_of(recurrent("lstm", layers=1))
    work = rule_of(node.op).work(node, operands, node.outputs)
    assert work.forward.gemms == (Gemm(12, 32, 8),) * 4
    assert work.forward.kernels == 4 * 3
    assert work.backward.total_flops == 2 * work.forward.total_flops
