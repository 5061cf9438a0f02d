"""Reductions and scans on every option: sums over a split dim are partial, means are divided by the global count."""

from __future__ import annotations

import pytest
from autopar.planner.sharding.rules import rule_of
from harness import case, check, node_of, randint, randn

x = randn(4, 8, 4)
mask = randint(2, 4, 8).bool()
ALL = ("d0", "d1", "d2")

CASES = (
    case("aten.sum.default", x, labels=(*ALL, "partial")),
    case("aten.sum.dim_IntList", x, (1,), labels=(*ALL, "partial")),
    case("aten.sum.dim_IntList", x, (0, -1), True, labels=(*ALL, "partial")),
    case("aten.sum.default", mask, labels=("d0", "d1")),
    case("aten.mean.default", x, labels=(*ALL, "partial")),
    case("aten.mean.dim", x, (-1,), True, labels=(*ALL, "partial")),
    case("aten.mean.dim", x, (0, 1), labels=(*ALL, "partial")),
    case("aten.count_nonzero.dim_IntList", mask, (1,), labels=("d0", "d1")),
    case("aten.amax.default", x, (1,), labels=("d0", "d2")),
    case("aten.amin.default", x, (1,), True, labels=("d0", "d2")),
    case("aten.max.dim", x, 1, labels=("d0", "d2")),
    case("aten.argmax.default", x, -1, labels=("d0", "d1")),
    case("aten.prod.dim_int", x, 0, labels=("d1", "d2")),
    case("aten.any.dim", mask, 1, labels=("d0",)),
    case("aten.all.default", mask),
    case("aten.max.default", x),
    case("aten.var.correction", x, (2,), labels=("d0", "d1"), keepdim=True),
    case("aten.var_mean.correction", x, (0,), labels=("d1", "d2")),
    case("aten.std.correction", x, (1,), labels=("d0", "d2"), correction=0),
    case("aten.logsumexp.default", x, (1,), labels=("d0", "d2")),
    case("aten.linalg_vector_norm.default", x, 2, (1,), True, labels=("d0", "d2")),
    case("aten.cumsum.default", x, 1, labels=("d0", "d2", "partial")),
    case("aten.cumprod.default", x, -1, labels=("d0", "d1")),
    case("aten.logcumsumexp.default", x, 0, labels=("d1", "d2")),
    case("aten.topk.default", x, 3, 1, labels=("d0", "d2")),
    case("aten.sort.default", x, labels=("d0", "d1")),
    case("aten.argsort.default", x, 1, labels=("d0", "d2")),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_reductions_are_exact_on_every_option() -> None:
    assert check(CASES) > 200


def test_a_mean_over_a_split_dim_is_divided_by_all_parts() -> None:
    node, _ = node_of(case("aten.mean.dim", x, (1,)))
    rule, sizes = rule_of(node.op), {"dp": 2, "microbatch": 4, "tp": 2}
    labels = {"dp": "d1", "microbatch": "d1", "tp": "d0"}
    assert rule.localise(node, labels, node.outputs, sizes).divide_by == 8
    assert rule.localise(node, {"dp": "partial"}, node.outputs, sizes).divide_by == 1
