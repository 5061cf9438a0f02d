"""Losses on every option: partial sums over samples, classes split without gathering logits."""

from __future__ import annotations

import pytest
import torch
from autopar.planner.capture.graph import TensorType
from autopar.planner.sharding.rules import options_of, rule_of
from harness import case, check, node_of, randint, randn

CROSS, NLL = "aten.cross_entropy_loss.default", "aten.nll_loss_nd.default"
LOGITS, IMAGE = randn(8, 8) * 10.0, randn(4, 8, 4)
TARGET, PIXELS = randint(8, 8), randint(8, 4, 4)
IGNORING = TARGET.clone()
IGNORING[2:4] = -100
WEIGHT, CHANCES = randn(8).abs(), randn(8, 8, seed=5).softmax(1)
NONE, MEAN, SUM = 0, 1, 2
CROSS_ENTROPY = (
    case(CROSS, LOGITS, TARGET, None, SUM, labels=("d0", "v")),
    case(CROSS, LOGITS, IGNORING, None, SUM, labels=("d0", "v")),
    case(CROSS, LOGITS, TARGET, None, SUM, 3, labels=("d0", "v")),
    case(CROSS, LOGITS, IGNORING, None, NONE, -100, 0.1, labels=("d0", "v")),
    case(CROSS, LOGITS, IGNORING, None, MEAN, labels=("v",)),
    case(CROSS, LOGITS, IGNORING, WEIGHT, MEAN, -100, 0.2, no_grad=(2,), labels=("v",)),
    case(CROSS, LOGITS, IGNORING, WEIGHT, SUM, -100, 0.2, no_grad=(2,), labels=("d0", "v")),
    case(CROSS, IMAGE, PIXELS, None, SUM, labels=("d0", "d2", "v")),
    case(CROSS, IMAGE, PIXELS, WEIGHT, NONE, no_grad=(2,), labels=("d0", "d2", "v")),
    case(CROSS, LOGITS, CHANCES, None, MEAN, no_grad=(1,), labels=("d0",)),
    case(CROSS, LOGITS, CHANCES, None, SUM, no_grad=(1,), labels=("d0",)),
    case(CROSS, randn(8), randint(8), None, SUM, labels=("v",)),
    case(NLL, LOGITS, IGNORING, None, SUM, labels=("d0", "v")),
    case(NLL, LOGITS, TARGET, WEIGHT, SUM, 3, no_grad=(2,), labels=("d0", "v")),
    case(NLL, IMAGE, PIXELS, None, NONE, labels=("d0", "d2", "v")),
    case(NLL, LOGITS, TARGET, None, MEAN, labels=()),
)
X, Y, UNIT = randn(4, 8), randn(4, 8, seed=3), randn(4, 8, seed=4).sigmoid()
BCE, BCE_LOGITS = "aten.binary_cross_entropy.default", "aten.binary_cross_entropy_with_logits.default"
POINTWISE = (
    *(
        case(f"aten.{name}.default", X, Y, reduction, labels=("d0", "d1"))
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for reduction in (NONE, MEAN, SUM)
    ),
    case("aten.huber_loss.default", X, Y, MEAN, 0.3, labels=("d0", "d1")),
    case("aten.kl_div.default", X, Y, MEAN, log_target=True, labels=("d0", "d1")),
    case("aten.kl_div.default", X, UNIT, SUM, no_grad=(1,), labels=("d0", "d1")),
    case(BCE, UNIT, UNIT.flip(0), None, MEAN, labels=("d0", "d1"), no_grad=(1,)),
    case(BCE_LOGITS, X, UNIT, None, None, MEAN, labels=("d0", "d1"), no_grad=(1,)),
    case(BCE_LOGITS, X, UNIT, randn(4, 1).abs(), randn(8).abs(), SUM, labels=("d0", "d1"), no_grad=(1, 2, 3)),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_cross_entropy_is_exact_on_every_option() -> None:
    assert check(CROSS_ENTROPY) > 100


@pytest.mark.slow
@pytest.mark.gloo
def test_pointwise_losses_are_exact_on_every_option() -> None:
    assert check(POINTWISE, pairs=False) > 60


def test_split_classes_reduce_two_numbers_a_sample() -> None:
    node, operands = node_of(CROSS_ENTROPY[0])
    local = [TensorType(shape=(8, 4), dtype="float64", requires_grad=True), operands[1]]
    uses = rule_of(CROSS).collectives(node, "v", "tp", 2, local, node.outputs)
    assert [(u.op, u.num_bytes, u.phase) for u in uses] == [("all_reduce", 8 * 8, "forward")] * 2
    assert [o.label for o in options_of(node, operands) if o.runs_collectives] == ["v"]


def test_cross_entropy_keeps_as_much_as_its_logits() -> None:
    node, operands = node_of(CROSS_ENTROPY[0])
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    logits = LOGITS.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        torch.nn.functional.cross_entropy(logits, TARGET, reduction="sum")
    declared = rule_of(CROSS).saved(node)
    total_weight = 8
    assert sum(saved.values()) == sum(operands[i].num_bytes for i in declared.operands) + total_weight
