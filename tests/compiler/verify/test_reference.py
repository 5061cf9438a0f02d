"""The reference notices what a module does not compute in the dtype of its weights."""

import pytest
import torch
from autopar.compiler.verify.reference import FixedDtypes, norm_of, optimizers
from torch import nn


def found(function):
    with FixedDtypes(torch.float64) as fixed:
        function(torch.ones(3, 4, dtype=torch.float64))
    return fixed.found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.float().mean(),
        lambda x: x + torch.zeros(4),
        lambda x: torch.polar(x.float(), x.float()),
        lambda x: (x @ torch.ones(4, 4, dtype=torch.float64)).to(torch.bfloat16),
    ],
)
def test_a_fixed_dtype_is_noticed(function):
    assert "makes torch." in found(function)


def test_what_follows_the_input_is_not_noticed():
    def function(x):
        rows = torch.arange(3) + x.argmax(1)
        return torch.where(rows.bool()[:, None], x, x.new_zeros(())).softmax(1), torch.view_as_complex(x.view(6, 2))

    assert found(function) == ""


def test_a_stage_without_parameters_has_an_optimizer():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for make in optimizers(torch.tensor(1.0)).values():
        make([]).step()
        make([weight]).step()
    assert (weight < 1).all()


def test_the_exact_norm_is_added_up_in_float64():
    values = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    exact = values.double().square().sum().sqrt()
    assert norm_of([values[:10], values[10:]], torch.float64) == pytest.approx(float(exact), rel=1e-12)
    assert norm_of([values], torch.float32).dtype == torch.float32
    assert norm_of([], torch.float64) == 0
    assert norm_of([torch.tensor([3 + 4j])], torch.float64) == 5
