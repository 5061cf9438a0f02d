"""Draws are the same numbers wherever they are called from, and random again afterwards."""

import pytest
import torch
from autopar.compiler.verify.draws import draws_fixed
from torch import rand as imported_by_name

DRAWS = {
    "rand": lambda: torch.rand(64),
    "by name": lambda: imported_by_name(64),
    "rand_like": lambda: torch.rand_like(torch.empty(64)),
    "randn": lambda: torch.randn(64),
    "randint": lambda: torch.randint(2, 90, (64,)),
    "randint by keyword": lambda: torch.randint(high=90, size=(64,)),
    "randperm": lambda: torch.randperm(64),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "bernoulli, method": lambda: torch.full((64,), 0.5).bernoulli(),
    "bernoulli, filling": lambda: torch.empty(64).bernoulli_(0.5),
    "bernoulli, filling with integers": lambda: torch.empty(64, dtype=torch.long).bernoulli_(0.5),
    "normal": lambda: torch.normal(torch.zeros(64), 2.0),
    "normal, filling": lambda: torch.empty(64).normal_(1.0, 2.0),
    "uniform": lambda: torch.empty(64).uniform_(-1, 5),
    "exponential": lambda: torch.empty(64).exponential_(2.0),
    "random": lambda: torch.empty(64).random_(3, 90),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_fixed_and_random_again(draw):
    with draws_fixed():
        first, second = draw(), draw()
    assert first.equal(second)
    assert not draw().equal(draw())
    assert first.dtype == draw().dtype


def test_a_part_has_the_values_of_the_whole():
    with draws_fixed():
        assert torch.rand(8, 1)[:4].equal(torch.rand(4, 1))
