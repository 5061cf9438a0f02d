"""Attention on every option: batch, heads by key-value group, queries with a causal offset, masks that broadcast."""

from __future__ import annotations

import pytest
import torch
from autopar.planner.sharding.rules import SeedRef, options_of, rule_of
from harness import case, check, node_of, randn

OP = "aten.scaled_dot_product_attention.default"
Q, K, V = randn(4, 4, 8, 4), randn(4, 4, 8, 4, seed=1), randn(4, 4, 8, 4, seed=2)
MASK = torch.ones(8, 8, dtype=torch.bool).tril()
ALL = ("d0", "d1", "q")
CASES = (
    case(OP, Q, K, V, labels=ALL),
    case(OP, Q, K, V, None, 0.0, True, labels=ALL),
    case(OP, Q, K, V, MASK, labels=ALL),
    case(OP, Q, K, V, randn(4, 1, 8, 8), labels=ALL),
    case(OP, Q, K, V, randn(1, 4, 1, 8), scale=0.3, labels=ALL),
    case(OP, randn(4, 16, 8, 4), K, V, None, 0.0, True, enable_gqa=True, labels=(*ALL, "r")),
    case(OP, randn(4, 8, 8, 4), K[:, :2], V[:, :2], randn(8, 8, 8), enable_gqa=True, labels=(*ALL, "r")),
    # One key-value head for all query heads.
    case(OP, randn(4, 4, 8, 4), K[:, :1], V[:, :1], enable_gqa=True, labels=("d0", "r", "q")),
    case(OP, randn(4, 8, 4), randn(4, 12, 4), randn(4, 12, 8), labels=("d0", "q")),
    # Causal with more keys than queries counts from the upper left corner: queries stay whole.
    case(OP, Q, randn(4, 4, 12, 4), randn(4, 4, 12, 4), None, 0.0, True, labels=("d0", "d1")),
    case(OP, Q, K[:1], V[:1], labels=()),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_attention_is_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_heads_are_split_by_key_value_groups() -> None:
    node, operands = node_of(case(OP, randn(2, 8, 4, 4), randn(2, 2, 4, 4), randn(2, 2, 4, 4), enable_gqa=True))
    assert {o.label: o.extent for o in options_of(node, operands)}["d1"] == 2


def test_dropout_draws_by_what_is_split() -> None:
    node, _ = node_of(case(OP, Q, K, V, None, 0.5, True))
    sizes = {"dp": 2, "microbatch": 2, "tp": 2}
    call = rule_of(OP).localise(node, {"dp": "d0", "microbatch": "d0", "tp": "q"}, node.outputs, sizes)
    assert call.target == "causal_attention_rows"
    assert dict(call.kwargs) == {"dropout_p": 0.5, "seed": SeedRef(("dp", "tp"))}
    call = rule_of(OP).localise(node, {"dp": "none", "microbatch": "d0", "tp": "grad"}, node.outputs, sizes)
    assert call.target == "seeded_attention"
    assert dict(call.kwargs) == {"seed": SeedRef(())}


def test_causal_work_is_half_and_that_of_the_last_rank() -> None:
    node, operands = node_of(CASES[1])
    full, _ = node_of(CASES[0])
    rule = rule_of(OP)
    whole = rule.work(full, operands, full.outputs).forward.attention_flops
    assert whole == 2 * 2 * 16 * 8 * 8 * 4
    assert rule.work(node, operands, node.outputs).forward.attention_flops == whole // 2
    query = type(operands[0])(shape=(4, 4, 4, 4), dtype="float64", requires_grad=True)
    local = rule.work(node, [query, *operands[1:]], [query]).forward.attention_flops
    assert local == whole * 24 // 64  # queries 4 to 7 see 8 * 4 - 8 of the 64 pairs


def test_saved_tensors_are_those_of_the_fused_kernel() -> None:
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    tensors = [x.float().requires_grad_() for x in (Q, K, V)]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
    node, operands = node_of(case(OP, Q.float(), K.float(), V.float(), None, 0.0, True))
    declared = rule_of(OP).saved(node)
    total = sum(operands[i].num_bytes for i in declared.operands)
    total += sum(node.outputs[i].num_bytes for i in declared.outputs) + declared.extra_bytes
    assert total == sum(saved.values())
