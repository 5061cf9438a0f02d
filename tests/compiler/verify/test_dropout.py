"""Dropout is off wherever it is called from, and on again afterwards."""

import torch
import torch.nn.functional as F
from autopar.compiler.verify.dropout import dropout_off
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import dropout as imported_by_name
from torch.nn.functional import scaled_dot_product_attention as attention_by_name
from torch.utils.checkpoint import checkpoint


def functions():
    layer = nn.Dropout(0.9)
    return {
        "module": layer,
        "functional": lambda x: F.dropout(x, 0.9),
        "by keyword": lambda x: F.dropout(x, p=0.9),
        "by name": lambda x: imported_by_name(x, 0.9),
        "torch": lambda x: torch.dropout(x, 0.9, True),
        "native": lambda x: torch.native_dropout(x, 0.9, True)[0],
        "channels": lambda x: F.dropout2d(x[None], 0.9)[0],
    }


def test_every_dropout_keeps_everything():
    x = torch.rand(4, 8, 8) + 1
    for name, function in functions().items():
        with dropout_off():
            assert function(x).equal(x), name
        assert not function(x).equal(x), name


def test_recurrent_layers_keep_everything_between_them():
    x = torch.rand(5, 2, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layers = kind(4, 4, num_layers=2, dropout=0.9)
        with dropout_off():
            assert layers(x)[0].equal(layers.eval()(x)[0])
        assert not layers.train()(x)[0].equal(layers.eval()(x)[0])


def test_attention_does_not_drop_weights():
    q = torch.rand(1, 2, 8, 4)
    want = F.scaled_dot_product_attention(q, q, q)
    with dropout_off():
        assert F.scaled_dot_product_attention(q, q, q, dropout_p=0.9).allclose(want)
        assert F.scaled_dot_product_attention(q, q, q, None, 0.9).allclose(want)


def test_attention_with_a_mask_that_is_a_subclass_does_not_drop_weights():
    q, k = torch.rand(1, 2, 3, 4), torch.rand(1, 2, 8, 4)
    mask = causal_lower_right(3, 8)
    want = F.scaled_dot_product_attention(q, k, k, mask)
    with dropout_off():
        assert F.scaled_dot_product_attention(q, k, k, mask, 0.9).allclose(want)
        assert attention_by_name(q, k, k, mask, dropout_p=0.9).allclose(want)


def test_recomputation_keeps_everything_too():
    x = torch.rand(4, 8, requires_grad=True)
    weight = torch.rand(8, 8, requires_grad=True)

    def block(x):
        return F.dropout((x @ weight).tanh(), 0.9).tanh()

    block_without = (x @ weight).tanh().tanh().sum()
    want = torch.autograd.grad(block_without, weight)[0]
    with dropout_off():
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert weight.grad.allclose(want)
