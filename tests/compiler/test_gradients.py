"""Which parameters of a template may get a gradient that another tensor has too."""

from __future__ import annotations

import pytest
from autopar.compiler.gradients import shared_gradients
from autopar.planner.capture.graph import Kind, Node, Ref, Template, TensorType
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.program import local_program

WHOLE, ROW = (4, 4), (4,)


def program(*ops, sizes):
    """`ops` are (name, operation, arguments); parameters are named in `sizes`."""
    nodes = [Node(name="x", kind=Kind.INPUT, outputs=(TensorType(shape=WHOLE, requires_grad=True),))]
    for name, shape in sizes.items():
        nodes.append(Node(name=name, kind=Kind.PARAMETER, outputs=(TensorType(shape=shape, requires_grad=True),)))
    for name, op, args in ops:
        nodes.append(
            Node(name=name, kind=Kind.OP, op=op, args=args, outputs=(TensorType(shape=WHOLE, requires_grad=True),))
        )
    template = Template(name="T", pattern="", nodes=tuple(nodes), outputs=(Ref(ops[-1][0]),))
    return local_program(template, {}, Mesh(tp=2))


def op(name, kind, *args):
    return name, kind, tuple(Ref(arg) if isinstance(arg, str) else arg for arg in args)


@pytest.mark.parametrize(
    ("ops", "sizes", "want"),
    [
        ([op("y", "aten.add.Tensor", "a", "b")], {"a": WHOLE, "b": WHOLE}, {"a", "b"}),
        ([op("y", "aten.add.Tensor", "x", "a")], {"a": ROW}, set()),
        ([op("y", "aten.linear.default", "x", "a")], {"a": WHOLE}, set()),
        ([op("t", "aten.transpose.int", "a", 0, 1), op("y", "aten.mm.default", "x", "t")], {"a": WHOLE}, set()),
        ([op("t", "aten.transpose.int", "a", 0, 1), op("y", "aten.add.Tensor", "x", "t")], {"a": WHOLE}, {"a"}),
        ([op("t", "aten.mul.Tensor", "a", "x"), op("y", "aten.sub.Tensor", "b", "t")], {"a": WHOLE, "b": WHOLE}, {"b"}),
    ],
)  # fmt: skip
def test_shared_gradients(ops, sizes, want):
    assert shared_gradients(program(*ops, sizes=sizes)) == want


def test_a_parameter_that_is_returned_may_share():
    ops = [op("t", "aten.transpose.int", "a", 0, 1)]
    assert shared_gradients(program(*ops, sizes={"a": WHOLE})) == {"a"}
