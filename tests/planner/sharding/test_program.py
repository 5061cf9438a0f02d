"""Graph + placements + mesh -> local programs: a two-layer perceptron the Megatron way, sharing, edges, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar.planner.capture.graph import (
    Kind,
    ModelGraph,
    ModelInput,
    Node,
    ParameterInfo,
    Ref,
    Template,
    TensorType,
    Unit,
    Value,
)
from autopar.planner.errors import CannotLower
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.program import Compute, Convert, ModelProgram, local_program, model_program

B, C, H = 8, 16, 64


def _type(*shape: int) -> TensorType:
    return TensorType(shape=shape, requires_grad=True)


def _op(name: str, op: str, args: tuple, *shape: int) -> Node:
    return Node(name=name, kind=Kind.OP, op=f"aten.{op}", args=args, outputs=(_type(*shape),))


def _mlp() -> Template:
    return Template(
        name="Mlp",
        pattern="mlp",
        nodes=(
            Node(name="x", kind=Kind.INPUT, outputs=(_type(B, C),)),
            Node(name="up.weight", kind=Kind.PARAMETER, outputs=(_type(H, C),)),
            Node(name="down.weight", kind=Kind.PARAMETER, outputs=(_type(C, H),)),
            _op("up", "linear.default", (Ref("x"), Ref("up.weight")), B, H),
            _op("gelu", "gelu.default", (Ref("up"),), B, H),
            _op("down", "linear.default", (Ref("gelu"), Ref("down.weight")), B, C),
            _op("add", "add.Tensor", (Ref("down"), Ref("x")), B, C),
        ),
        outputs=(Ref("add"),),
    )


MEGATRON = {
    "x": {"tp": "R"},
    "up.weight": {"tp": "S(0)"},
    "down.weight": {"tp": "S(1)"},
    "up": {"tp": "n"},
    "gelu": {"tp": "d1"},
    "down": {"tp": "k"},
    "add": {"tp": "none"},
}
DATA = {
    "x": "S(0)", "up.weight": "R/P", "down.weight": "R/P", "up": "d0", "gelu": "d0", "down": "d0", "add": "d0",
}  # fmt: skip


def test_column_then_row_split_has_one_all_reduce_each_way() -> None:
    program = local_program(_mlp(), MEGATRON, Mesh(tp=4))
    uses = [(use.op, use.phase, use.num_bytes) for use in program.collectives()]
    assert uses == [("all_reduce", "backward", B * C * 4), ("all_reduce", "forward", B * C * 4)]
    shapes = {step.node.name: step.outputs[0].shape for step in program.steps if isinstance(step, Compute)}
    assert shapes == {"up": (B, H // 4), "gelu": (B, H // 4), "down": (B, C), "add": (B, C)}
    assert program.outputs[0].layout == {}


def test_data_parallel_axes_add_nothing_inside_a_unit() -> None:
    both = {name: {**axes, "dp": DATA[name]} for name, axes in MEGATRON.items()}
    program = local_program(_mlp(), both, Mesh(dp=2, tp=4))
    assert {use.axis for use in program.collectives()} == {"tp"}
    assert {use.num_bytes for use in program.collectives()} == {B * C * 4 // 2}
    weights = {var.ref.node: {axis: str(pair) for axis, pair in var.pairs} for var in program.tensors}
    assert weights == {"up.weight": {"dp": "R/P", "tp": "S(0)"}, "down.weight": {"dp": "R/P", "tp": "S(1)"}}


def test_consumers_that_want_the_same_layout_share_one_conversion() -> None:
    template = Template(
        name="Two",
        pattern="two",
        nodes=(
            Node(name="x", kind=Kind.INPUT, outputs=(_type(B, C),)),
            _op("a", "gelu.default", (Ref("x"),), B, C),
            _op("b", "relu.default", (Ref("x"),), B, C),
        ),
        outputs=(Ref("a"), Ref("b")),
    )
    program = local_program(template, {"x": {"tp": "S(0)"}, "a": {"tp": "d1"}, "b": {"tp": "d1"}}, Mesh(tp=2))
    assert [step.change.conversion.function for step in program.steps if isinstance(step, Convert)] == ["all_to_all"]


def test_conversions_behind_which_no_gradient_flows_have_no_backward() -> None:
    detached = Node(
        name="detach", kind=Kind.OP, op="aten.detach.default", args=(Ref("gelu"),),
        outputs=(TensorType(shape=(B, H)),),
    )  # fmt: skip
    mlp = _mlp()
    nodes = (*mlp.nodes[:-2], detached, *mlp.nodes[-2:], _op("twice", "relu.default", (Ref("gelu"),), B, H))
    labels = {**MEGATRON, "detach": {"tp": "d0"}, "twice": {"tp": "d0"}}
    for outputs, phases in (((), ["forward"]), ((Ref("twice"),), ["forward", "backward"])):
        template = replace(mlp, nodes=nodes, outputs=(Ref("add"), Ref("detach"), *outputs))
        uses = local_program(template, labels, Mesh(tp=4)).collectives()
        assert [use.phase for use in uses if use.op == "all_to_all"] == phases


def test_the_receiver_of_a_value_converts_it() -> None:
    mlp = _mlp()
    prelude = Template(
        name="Prelude",
        pattern="",
        nodes=(Node(name="x", kind=Kind.INPUT, outputs=(_type(B, C),)),),
        outputs=(Ref("x"),),
    )
    tensors = (("up.weight", "up.weight"), ("down.weight", "down.weight"))
    graph = ModelGraph(
        name="m",
        batch_size=B,
        inputs=(ModelInput(name="x", type=_type(B, C), batch_dim=0),),
        templates=(prelude, mlp),
        units=(
            Unit(template=0, fqn="", inputs=()),
            Unit(template=1, fqn="mlp", inputs=(Value(0, 0),), tensors=tensors),
        ),
        loss=Value(1, 0),
        tensors={"up.weight": ParameterInfo(type=_type(H, C)), "down.weight": ParameterInfo(type=_type(C, H))},
    )
    program = model_program(graph, ({"x": {"tp": "S(0)"}}, MEGATRON), Mesh(tp=2))
    value, changes = program.edge(1, 0)
    assert value == Value(0, 0)
    assert [change.conversion.function for change in changes] == ["all_gather_replicated"]


def test_labels_and_splits_that_cannot_be_are_refused() -> None:
    with pytest.raises(KeyError, match="no option 'z'"):
        local_program(_mlp(), {**MEGATRON, "up": {"tp": "z"}}, Mesh(tp=2))
    with pytest.raises(CannotLower, match="cannot be split"):
        local_program(_mlp(), MEGATRON, Mesh(tp=3))
    crossing = {**MEGATRON, "gelu": {"tp": "d1;2", "dp": "d1"}}
    local_program(_mlp(), crossing, Mesh(dp=2, tp=2))
    with pytest.raises(CannotLower, match="cannot be split"):
        local_program(_mlp(), crossing, Mesh(dp=4, tp=2))


def _prelude_reader(placed: dict[str, str], mesh: Mesh, wanted: dict[str, str]) -> ModelProgram:
    """A block that multiplies by a value of the prelude, made as `placed` and read as `wanted`."""
    prelude = Template(
        name="Prelude",
        pattern="",
        nodes=(Node(name="x", kind=Kind.INPUT, outputs=(TensorType(shape=(B, C)),)),),
        outputs=(Ref("x"),),
    )
    nodes = (
        Node(name="x", kind=Kind.INPUT, outputs=(TensorType(shape=(B, C)),)),
        Node(name="scale", kind=Kind.PARAMETER, outputs=(_type(C),)),
        _op("mul", "aten.mul.Tensor", (Ref("x"), Ref("scale")), B, C),
    )
    block = Template(name="Block", pattern="block", nodes=nodes, outputs=(Ref("mul"),))
    graph = ModelGraph(
        name="m",
        batch_size=B,
        inputs=(ModelInput(name="x", type=TensorType(shape=(B, C)), batch_dim=0),),
        templates=(prelude, block),
        units=(
            Unit(template=0, fqn="", inputs=()),
            Unit(template=1, fqn="block", inputs=(Value(0, 0),), tensors=(("scale", "scale"),)),
        ),
        loss=Value(1, 0),
        tensors={"scale": ParameterInfo(type=_type(C))},
    )
    return model_program(graph, ({"x": placed}, {"x": wanted}), mesh)


def test_values_of_the_prelude_are_converted_once_a_step_before_they_are_sliced() -> None:
    program = _prelude_reader({"tp": "S(1)"}, Mesh(tp=2, microbatches=2), {"microbatch": "S(0)"})
    (gather,) = program.prepared(1, 0)
    assert (gather.axis, gather.conversion.function) == ("tp", "all_gather_replicated")
    assert gather.after.shape == (B, C)  # of the whole step, not of one microbatch


def test_conversions_that_must_follow_the_slice_stay_with_the_microbatches() -> None:
    # The microbatch's rows are split over tp: not the rows of the step.
    program = _prelude_reader({}, Mesh(tp=2, microbatches=2), {"microbatch": "S(0)", "tp": "S(0)"})
    assert program.prepared(1, 0) == ()
    assert [change.axis for change in program.in_microbatch(1, 0)] == ["tp"]


def test_what_a_major_axis_splits_it_splits_before_the_slice() -> None:
    # A rank of dp has rows that follow each other, and its microbatches are parts of them.
    wanted = {"dp": "S(0)", "microbatch": "S(0)", "tp": "S(0)"}
    program = _prelude_reader({}, Mesh(dp=2, tp=2, microbatches=2), wanted)
    assert [change.axis for change in program.prepared(1, 0)] == ["dp"]
    assert [change.axis for change in program.in_microbatch(1, 0)] == ["tp"]


def test_values_that_lie_as_wanted_need_no_preparation() -> None:
    program = _prelude_reader({}, Mesh(tp=2), {})
    assert program.prepared(1, 0) == ()
