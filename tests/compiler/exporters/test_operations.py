"""Single operations as text: what they compute is what the graph says."""

from __future__ import annotations

import pytest
from autopar.compiler.exporters.pytorch.arguments import Context
from autopar.compiler.exporters.pytorch.operations import render
from autopar.compiler.source import Expr
from autopar.planner.capture.graph import Symbol
from autopar.planner.sharding.rules import Call, Operand

CONTEXT = Context(axes={}, seed=str)
FLOAT32 = (("dtype", Symbol("dtype", "float32")),)


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "want"),
    [
        # The condition is the first argument of the operation, but not what the method is called on.
        ("aten.where.self", (Operand(0), Operand(1), Operand(2)), (), "torch.where(a, b, c)"),
        ("aten.masked_fill.Scalar", (Operand(0), Operand(1), 0.5), (), "a.masked_fill(b, 0.5)"),
        # float32 is the default dtype, and left to it: the same code then runs in float64.
        ("aten.zeros.default", ((2, 3),), FLOAT32, "torch.zeros((2, 3), device=device)"),
        ("aten.full.default", ((2,), 0.5), FLOAT32, "torch.full((2,), 0.5, device=device)"),
        # Functions of `torch` take no reduction for "none", their operations for "mean".
        (
            "aten.cosine_embedding_loss.default", (Operand(0), Operand(1), Operand(2), 0.5), (),
            "torch.cosine_embedding_loss(a, b, c, 0.5, reduction=1)",
        ),
        # These would be integers.
        ("aten.full.default", ((2,), 1), FLOAT32, "torch.full((2,), 1, dtype=torch.float32, device=device)"),
        ("aten.arange.default", (4,), FLOAT32, "torch.arange(4, dtype=torch.float32, device=device)"),
    ],
)  # fmt: skip
def test_text(target, args, kwargs, want):
    call = Call(target=target, args=args, kwargs=kwargs)
    assert render(call, [Expr(name) for name in "abc"], CONTEXT).text == want
