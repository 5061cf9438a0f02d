"""Stages: what crosses their edges, which units become loops, how tensors are held. On small graphs made by hand."""

from __future__ import annotations

import pytest
from autopar.compiler.held import HeldTensor
from autopar.compiler.lower import LoweredModel, crossing, lower
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
from autopar.planner.errors import AutoparError
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.placement import parse_pair
from autopar.planner.sharding.program import model_program

WIDTH = 8
X = TensorType(shape=(4, WIDTH), requires_grad=True)
DATA = TensorType(shape=(4, WIDTH))
WEIGHT = TensorType(shape=(WIDTH, WIDTH), requires_grad=True)


def _prelude() -> Template:
    return Template(
        name="Prelude", pattern="", nodes=(Node(name="x", kind=Kind.INPUT, outputs=(DATA,)),), outputs=(Ref("x"),)
    )


def _linear(name: str, *, is_module: bool, data: bool = False) -> Template:
    nodes = (
        Node(name="x", kind=Kind.INPUT, outputs=(DATA if data else X,)),
        Node(name="fc.weight", kind=Kind.PARAMETER, outputs=(WEIGHT,)),
        Node(
            name="fc.linear", kind=Kind.OP, outputs=(X,), op="aten.linear.default", args=(Ref("x"), Ref("fc.weight")),
            module="fc",
        ),
    )  # fmt: skip
    return Template(name=name, pattern="h.*", nodes=nodes, outputs=(Ref("fc.linear"),), is_module=is_module)


def _loss(*, skip: bool) -> Template:
    nodes = [Node(name="x", kind=Kind.INPUT, outputs=(X,))]
    nodes += [Node(name="skip", kind=Kind.INPUT, outputs=(X,))] if skip else []
    total = TensorType(shape=(), requires_grad=True)
    if skip:
        nodes.append(Node(name="add", kind=Kind.OP, outputs=(X,), op="aten.add.Tensor", args=(Ref("x"), Ref("skip"))))
    nodes.append(
        Node(name="sum", kind=Kind.OP, outputs=(total,), op="aten.sum.default", args=(Ref("add" if skip else "x"),))
    )
    return Template(name="Loss", pattern="", nodes=tuple(nodes), outputs=(Ref("sum"),))


def _graph(*, blocks: int = 4, skip: bool = False, tied: bool = False) -> ModelGraph:
    """prelude, an embedding-like first product, equal blocks, the loss; with `skip` the loss also reads unit 1."""
    units = [
        Unit(template=0, fqn="", inputs=()),
        Unit(template=1, fqn="first", inputs=(Value(0, 0),), tensors=(("fc.weight", "first.fc.weight"),)),
    ]
    for index in range(blocks):
        fqn = "h.0.fc.weight" if tied else f"h.{index}.fc.weight"
        units.append(Unit(template=2, fqn=f"h.{index}", inputs=(Value(index + 1, 0),), tensors=(("fc.weight", fqn),)))
    last = (Value(blocks + 1, 0), Value(1, 0)) if skip else (Value(blocks + 1, 0),)
    units.append(Unit(template=3, fqn="", inputs=last))
    fqns = dict.fromkeys(fqn for unit in units for _, fqn in unit.tensors)
    return ModelGraph(
        name="m",
        batch_size=4,
        inputs=(ModelInput(name="x", type=DATA, batch_dim=0),),
        templates=(
            _prelude(), _linear("First", is_module=False, data=True), _linear("Block", is_module=True), _loss(skip=skip)
        ),
        units=tuple(units),
        loss=Value(len(units) - 1, 0),
        tensors={fqn: ParameterInfo(type=WEIGHT) for fqn in fqns},
    )  # fmt: skip


def _lower(graph: ModelGraph, stages: list[tuple[int, int]]) -> LoweredModel:
    program = model_program(graph, [{} for _ in graph.templates], Mesh(pp=len(stages)))
    return lower(program, stages)


def test_equal_blocks_are_one_run_per_stage() -> None:
    model = _lower(_graph(), [(0, 3), (3, 7)])
    assert [[run.units for run in stage.runs] for stage in model.stages] == [[(1,), (2,)], [(3, 4, 5), (6,)]]
    assert model.stages[1].runs[0].carried == ((0, 0),)


def test_a_block_that_is_read_elsewhere_ends_its_run() -> None:
    graph = _graph()
    units = list(graph.units)
    loss = units[-1]
    read_in_the_middle = Unit(template=loss.template, fqn="", inputs=(Value(5, 0), Value(3, 0)))
    units[-1] = read_in_the_middle
    templates = (*graph.templates[:3], _loss(skip=True))
    changed = ModelGraph(
        name="m", batch_size=4, inputs=graph.inputs, templates=templates, units=tuple(units), loss=graph.loss,
        tensors=graph.tensors,
    )  # fmt: skip
    model = _lower(changed, [(0, 7)])
    assert [run.units for run in model.stages[0].runs] == [(1,), (2, 3), (4, 5), (6,)]


def test_a_block_that_reads_another_blocks_tensor_ends_its_run() -> None:
    graph = _graph()
    units = list(graph.units)
    units[5] = Unit(template=2, fqn="h.3", inputs=units[5].inputs, tensors=(("fc.weight", "h.1.fc.weight"),))
    shared = ModelGraph(
        name="m", batch_size=4, inputs=graph.inputs, templates=graph.templates, units=tuple(units), loss=graph.loss,
        tensors=graph.tensors,
    )  # fmt: skip
    model = _lower(shared, [(0, 7)])
    assert [run.units for run in model.stages[0].runs] == [(1,), (2,), (3,), (4,), (5,), (6,)]
    tied = _lower(_graph(tied=True), [(0, 7)])  # one tensor for all: a loop can pass it
    assert [run.units for run in tied.stages[0].runs] == [(1,), (2, 3, 4, 5), (6,)]


def test_a_skip_passes_through_the_stages_between() -> None:
    graph = _graph(skip=True)
    model = _lower(graph, [(0, 2), (2, 4), (4, 7)])
    assert model.stages[0].sent == (Value(1, 0),)
    assert model.stages[1].received == (Value(1, 0),)
    assert model.stages[1].sent == (Value(1, 0), Value(3, 0))
    assert model.stages[2].received == model.stages[1].sent
    assert crossing(graph, 4) == model.stages[1].sent


def test_prelude_values_do_not_cross() -> None:
    model = _lower(_graph(), [(0, 3), (3, 7)])
    assert model.stages[0].prelude == (Value(0, 0),)
    assert model.stages[1].prelude == ()


def test_tied_parameters_name_their_holders() -> None:
    model = _lower(_graph(tied=True), [(0, 3), (3, 4), (4, 7)])
    assert model.ties == (("h.0.fc.weight", (0, 1, 2)),)


def test_unused_parameters_are_held_by_the_first_stage() -> None:
    graph = _graph()
    tensors = {**graph.tensors, "unused": ParameterInfo(type=WEIGHT)}
    graph = ModelGraph(
        name="m", batch_size=4, inputs=graph.inputs, templates=graph.templates, units=graph.units, loss=graph.loss,
        tensors=tensors,
    )  # fmt: skip
    model = _lower(graph, [(0, 3), (3, 7)])
    assert "unused" in [tensor.fqn for tensor in model.stages[0].tensors]
    assert "unused" not in [tensor.fqn for tensor in model.stages[1].tensors]


@pytest.mark.parametrize("stages", [[(0, 3), (4, 7)], [(0, 3), (3, 6)], [(0, 7), (7, 7)], [(2, 7)]])
def test_stages_that_do_not_cover_the_units_are_refused(stages: list[tuple[int, int]]) -> None:
    with pytest.raises(AutoparError, match="stages"):
        _lower(_graph(), stages)


def test_a_grouped_split_is_held_as_a_plain_shard() -> None:
    held = HeldTensor(
        fqn="w", type=TensorType(shape=(12, 8), requires_grad=True), splits=(("tp", parse_pair("S(0;3)")),),
        is_buffer=False, persistent=True,
    )  # fmt: skip
    assert (held.shape, held.shard_dim("tp"), held.fused_dim) == ((3, 4, 8), 1, 0)


def test_a_parameter_without_dims_is_held_with_one() -> None:
    value = TensorType(shape=(), requires_grad=True)
    held = HeldTensor(fqn="scale", type=value, splits=(), is_buffer=False, persistent=True)
    assert (held.shape, held.fused_dim) == ((1,), None)
    assert HeldTensor(fqn="count", type=value, splits=(), is_buffer=True, persistent=True).shape == ()
