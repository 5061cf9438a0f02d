"""What rules say that autograd keeps is what `saved_tensors_hooks` sees, for the operations that models are made of."""

from __future__ import annotations

import pytest
import torch
from autopar.planner.capture.graph import Symbol
from autopar.planner.sharding.rules import rule_of, saved_of
from harness import Case, _filled, _leaves, _run_aten, case, node_of, randint, randn

x, y, w = randn(4, 8), randn(4, 8, seed=1), randn(16, 8)
mask = randint(2, 4, 8).bool()

CASES = (
    case("aten.linear.default", x, w),
    case("aten.mm.default", x, randn(8, 4)),
    case("aten.bmm.default", randn(4, 8, 4), randn(4, 4, 8)),
    case("aten.matmul.default", randn(4, 8, 4), randn(4, 4, 8)),
    case("aten.embedding.default", w, randint(16, 4, 8)),
    case("aten.add.Tensor", x, y),
    case("aten.sub.Tensor", x, randn(8)),
    case("aten.mul.Tensor", x, y),
    case("aten.mul.Tensor", x, 0.5),
    case("aten.div.Tensor", x, y),
    case("aten.div.Tensor", x, 8.0),
    case("aten.mul.Tensor", x, y, no_grad=(0,)),
    case("aten.mul.Tensor", x, y, no_grad=(1,)),
    case("aten.div.Tensor", x, y, no_grad=(0,)),
    case("aten.div.Tensor", x, y, no_grad=(1,)),
    case("aten.linear.default", x, w, no_grad=(0,)),
    case("aten.linear.default", x, w, no_grad=(1,)),
    case("aten.relu.default", x, no_grad=(0,)),
    case("aten.neg.default", x),
    case("aten.clone.default", x),
    case("aten._to_copy.default", x, dtype=Symbol("dtype", "float32")),
    case("aten.relu.default", x),
    case("aten.gelu.default", x),
    case("aten.silu.default", x),
    case("aten.sigmoid.default", x),
    case("aten.tanh.default", x),
    case("aten.exp.default", x),
    case("aten.log.default", x.abs() + 1),
    case("aten.sqrt.default", x.abs() + 1),
    case("aten.rsqrt.default", x.abs() + 1),
    case("aten.reciprocal.default", x.abs() + 1),
    case("aten.cos.default", x),
    case("aten.sin.default", x),
    case("aten.abs.default", x),
    case("aten.square.default", x),
    case("aten.softplus.default", x),
    case("aten.leaky_relu.default", x),
    case("aten.hardtanh.default", x),
    case("aten.elu.default", x),
    case("aten.hardswish.default", x),
    case("aten.erf.default", x),
    case("aten.clamp.default", x, -1.0),
    case("aten.pow.Tensor_Scalar", x, 2),
    case("aten.maximum.default", x, y),
    case("aten.where.self", mask, x, y),
    case("aten.masked_fill.Scalar", x, mask, 0.0),
    case("aten.reshape.default", x, (32,)),
    case("aten.transpose.int", x, 0, 1),
    case("aten.expand.default", x, (4, 4, 8)),
    case("aten.split_with_sizes.default", x, (4, 4), 1),
    case("aten.slice.Tensor", x, 1, 0, 4),
    case("aten.select.int", x, 1, 0),
    case("aten.cat.default", (x, y), 1),
    case("aten.stack.default", (x, y)),
    case("aten.repeat.default", x, (2, 1)),
    case("aten.roll.default", x, (1,), (0,)),
    case("aten.tril.default", x),
    case("aten.constant_pad_nd.default", x, (1, 1)),
    case("aten.sum.default", x),
    case("aten.sum.dim_IntList", x, (1,)),
    case("aten.mean.dim", x, (1,)),
    case("aten.amax.default", x, (1,)),
    case("aten.logsumexp.default", x, (1,)),
    case("aten.cumsum.default", x, 1),
    case("aten.cumprod.default", x, 1),
    case("aten.max.dim", x, 1),
    case("aten.topk.default", x, 2),
    case("aten.sort.default", x),
    case("aten.var.correction", x, (1,)),
    case("aten.linalg_vector_norm.default", x, 2, (1,)),
    case("aten.prod.dim_int", x, 1),
    case("aten.gather.default", x, 1, randint(8, 4, 4)),
    case("aten.index_select.default", x, 1, randint(8, 4)),
    case("aten.index.Tensor", x, (randint(4, 4),)),
    case("aten.scatter.src", x, 1, randint(8, 4, 3), randn(4, 3)),
    case("aten.scatter_add.default", x, 1, randint(8, 4, 3), randn(4, 3)),
)


def kept_by_autograd(example: Case) -> tuple[set[int], set[int], int]:
    """Operand and output positions whose memory autograd keeps, and the bytes of everything else."""
    kept: list[torch.Tensor] = []
    operands = _leaves(example)

    def pack(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        results = _run_aten(example.op, *_filled(example, operands))
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    ins = {i for i, t in enumerate(operands) if t.untyped_storage().data_ptr() in memory}
    owned = {t.untyped_storage().data_ptr() for t in operands}
    outs = {
        i
        for i, t in enumerate(results)
        if t.untyped_storage().data_ptr() in memory and t.untyped_storage().data_ptr() not in owned
    }
    known = {t.untyped_storage().data_ptr() for t in (*operands, *results)}
    return ins, outs, sum(size for pointer, size in memory.items() if pointer not in known)


@pytest.mark.parametrize("example", CASES, ids=lambda c: c.op)
def test_saved_is_what_autograd_keeps(example: Case) -> None:
    node, operands = node_of(example)
    assert rule_of(node.op) is not None
    saved = saved_of(node, operands)
    assert (set(saved.operands), set(saved.outputs), saved.extra_bytes) == kept_by_autograd(example)
