"""Dropout is off wherever it is called from, recomputation in the backward included."""

import torch
import torch.nn.functional as F
from autopar.compiler.verify.dropout import dropout_off
from torch.utils.checkpoint import checkpoint


def test_every_call_keeps_everything():
    x = torch.ones(64)
    heads = torch.ones(1, 2, 4, 8)
    with dropout_off():
        assert F.dropout(x, 0.5).equal(x)
        assert torch.nn.Dropout(0.5)(x).equal(x)
        assert torch.dropout(x, p=0.5, train=True).equal(x)
        kept = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.9)
    assert kept.equal(F.scaled_dot_product_attention(heads, heads, heads))
    assert not F.dropout(x, 0.5).equal(x)


def test_attention_of_the_library():
    attention = torch.nn.MultiheadAttention(8, 2, dropout=0.9)
    x = torch.randn(4, 3, 8)
    with dropout_off():
        first, _ = attention(x, x, x)
        again, _ = attention(x, x, x)
    assert first.equal(again)


def test_recomputation_in_the_backward():
    calls = []

    def block(x):
        dropped = F.dropout(x, 0.5)
        calls.append(dropped.detach().clone())
        return (dropped * dropped).sin()

    x = torch.randn(64, requires_grad=True)
    with dropout_off():
        checkpoint(block, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert len(calls) == 2
    assert all(call.equal(x) for call in calls)
    wanted = torch.autograd.grad((x * x).sin().sum(), x)[0]
    assert x.grad is not None
    assert x.grad.equal(wanted)
