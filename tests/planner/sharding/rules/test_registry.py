"""What the registry promises: one rule an operation, none and grad for all, groups on demand, sensible costs."""

from __future__ import annotations

import pytest
from autopar.planner.capture.graph import Kind, Node, Ref, TensorType
from autopar.planner.sharding.placement import REPLICATED, SUMMED_GRADIENT
from autopar.planner.sharding.program import option_named
from autopar.planner.sharding.rules import (
    OpRule,
    interesting_groups,
    label_groups,
    options_of,
    plain_label,
    register,
    registered_ops,
    rule_of,
    saved_of,
)
from harness import case, node_of, randint, randn, template_of


def test_an_operation_has_one_rule() -> None:
    with pytest.raises(ValueError, match="two sharding rules"):
        register(OpRule(ops=("aten.linear.default",), options=lambda node, operands: ()))


def test_an_operation_without_a_rule_is_computed_alike_on_all_ranks() -> None:
    value = TensorType(shape=(4,), requires_grad=True)
    node = Node(name="op", kind=Kind.OP, op="custom.op.default", args=(Ref("x0"),), outputs=(value,))
    assert rule_of(node.op) is None
    none, grad = options_of(node, [value])
    assert (none.operands, none.outputs) == ((REPLICATED,), (REPLICATED,))
    assert (grad.operands, grad.outputs) == ((SUMMED_GRADIENT,), (SUMMED_GRADIENT,))
    assert saved_of(node, [value]).operands == (0,)
    assert interesting_groups(template_of(node, [value])) == frozenset()


def test_without_a_gradient_there_is_no_grad_option() -> None:
    node, operands = node_of(case("aten.ne.Scalar", randint(3, 4), 1))
    assert [o.label for o in options_of(node, operands)] == ["none", "d0"]
    assert option_named(node, operands, "grad").label == "none"


def test_labels_with_groups_are_found_by_name() -> None:
    node, operands = node_of(case("aten.linear.default", randn(4, 8), randn(12, 8)))
    option = option_named(node, operands, "n;3")
    assert [str(pair) for pair in (*option.operands, *option.outputs)] == ["R/P", "S(0;3)", "S(1;3)"]
    assert (plain_label("n;3"), label_groups("n;3"), label_groups("n")) == ("n", 3, 1)
    for missing in ("n;5", "z", "none;2"):
        with pytest.raises(KeyError, match="has no option"):
            option_named(node, operands, missing)


TABLE, PAIR = randn(8, 4), (1, randint(8, 4, 2))
EXAMPLES = (
    (case("aten.linear.default", randn(4, 8), randn(16, 8)), case("aten.linear.default", randn(8, 8), randn(16, 8))),
    (case("aten.gelu.default", randn(4, 8)), case("aten.gelu.default", randn(8, 8))),
    (case("aten.add.Tensor", randn(4, 8), randn(8)), case("aten.add.Tensor", randn(8, 8), randn(8))),
    (case("aten.mul.Tensor", randn(4, 8), randn(4, 8)), case("aten.mul.Tensor", randn(8, 8), randn(8, 8))),
    (case("aten.sum.default", randn(4, 8)), case("aten.sum.default", randn(8, 8))),
    (case("aten.cat.default", (randn(4, 8), randn(4, 8))), case("aten.cat.default", (randn(8, 8), randn(8, 8)))),
    (case("aten.embedding.default", TABLE, randint(8, 4)), case("aten.embedding.default", TABLE, randint(8, 8))),
    (case("aten.gather.default", randn(4, 8), *PAIR), case("aten.gather.default", randn(8, 8), 1, randint(8, 8, 2))),
)


@pytest.mark.parametrize(("small", "large"), EXAMPLES, ids=lambda c: c.op)
def test_work_grows_with_the_operands(small, large) -> None:
    works = []
    for example in (small, large):
        node, operands = node_of(example)
        works.append(rule_of(node.op).work(node, operands, node.outputs))
    for first, second in ((w.forward, v.forward) for w, v in [works]):
        assert 0 < first.bytes < second.bytes
        assert first.kernels == second.kernels > 0
        assert first.total_flops <= second.total_flops
    assert 0 <= works[0].backward.bytes <= works[1].backward.bytes


def test_views_are_free() -> None:
    for example in (case("aten.reshape.default", randn(4, 8), (32,)), case("aten.transpose.int", randn(4, 8), 0, 1)):
        node, operands = node_of(example)
        work = rule_of(node.op).work(node, operands, node.outputs)
        assert work.forward.bytes == work.forward.kernels == work.backward.bytes == 0


def test_every_operation_of_a_small_transformer_has_a_rule() -> None:
    needed = ("linear", "embedding", "layer_norm", "scaled_dot_product_attention", "cross_entropy_loss", "gelu")
    assert {f"aten.{name}.default" for name in needed if name != "gelu"} <= set(registered_ops())
    assert all(rule_of(f"aten.{name}.default") is not None for name in needed)
