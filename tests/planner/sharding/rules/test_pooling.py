"""Pools on every option: leading dims, windows with and without a halo, global means."""

from __future__ import annotations

import pytest
from autopar.planner.sharding.rules import options_of
from harness import case, check, node_of, randn

MAX, AVERAGE, ADAPTIVE = "aten.max_pool2d.default", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"
X = randn(4, 4, 8, 8)
LEADING = ("d0", "d1")
CASES = (
    case(MAX, X, (2, 2), labels=(*LEADING, "s0", "s1")),
    case(MAX, X - 9.0, (3, 3), (2, 2), (1, 1), labels=(*LEADING, "h0", "h1")),
    case(MAX, X, (3, 3), (1, 1), (1, 1), labels=(*LEADING, "h0", "h1")),
    case(MAX, randn(4, 8, 8), (3, 3), (2, 2), (1, 1), labels=("d0", "h0", "h1")),
    case("aten.max_pool1d.default", randn(4, 4, 16), (5,), (1,), (2,), (1,), labels=(*LEADING, "h0")),
    case("aten.max_pool2d_with_indices.default", X, (2, 2), labels=LEADING),
    case(AVERAGE, X, (2, 2), labels=(*LEADING, "s0", "s1")),
    case(AVERAGE, X, (3, 3), (1, 1), (1, 1), labels=(*LEADING, "h0", "h1")),
    case(AVERAGE, X, (3, 3), (1, 1), (1, 1), False, False, labels=LEADING),
    case("aten.avg_pool1d.default", randn(4, 4, 16), (3,), (2,), (1,), labels=(*LEADING, "h0")),
    case(ADAPTIVE, X, (1, 1), labels=(*LEADING, "s0", "s1")),
    case(ADAPTIVE, X, (4, 1), labels=(*LEADING, "s0", "s1")),
    case(ADAPTIVE, X, (3, 3), labels=LEADING),
)


@pytest.mark.slow
@pytest.mark.gloo
def test_pools_are_exact_on_every_option() -> None:
    assert check(CASES) > 100


def test_windows_that_hang_over_the_end_are_not_split() -> None:
    node, operands = node_of(case(MAX, randn(4, 4, 8, 8), (3, 3), (2, 2), (1, 1), 1, True))
    assert {option.label for option in options_of(node, operands)} == {"none", "grad", *LEADING}
