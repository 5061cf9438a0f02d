"""Graph -> integer program, against enumeration of labels priced from the lowered program."""

import random
from itertools import product

import pytest
from autopar.cost_models.compute import device_seconds
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.capture.graph import (
    Kind,
    ModelGraph,
    ModelInput,
    ParameterInfo,
    Ref,
    Template,
    Unit,
    Value,
)  # fmt: skip
from autopar.planner.errors import CannotLower
from autopar.planner.search.batch import find_batch_split, splits_evenly
from autopar.planner.search.placements_ilp import solve
from autopar.planner.search.prices import Prices, local_work
from autopar.planner.search.problem import build_problem, empty_placements
from autopar.planner.search.space import Rules, Space
from autopar.planner.sharding.mesh import MICROBATCH, Mesh
from autopar.planner.sharding.placement import REPLICATED as _R
from autopar.planner.sharding.placement import local_type
from autopar.planner.sharding.program import Compute, model_program
from graphs import leaf, op, residual_mlp, value

CLUSTER, STACK = load_cluster("h100-sxm"), load_stack("eager")


def random_graph(seed: int) -> ModelGraph:
    """A stack of two or three operations on one input, then the sum of its squares."""
    rng = random.Random(seed)
    batch, width, hidden = (rng.choice((2, 6, 8, 512, 4096)) for _ in range(3))
    nodes = [leaf("x", Kind.INPUT, value(batch, width, grad=False)), leaf("up", Kind.PARAMETER, value(hidden, width))]
    nodes.append(op("linear", "aten.linear.default", (Ref("x"), Ref("up")), value(batch, hidden)))
    last = "linear"
    if rng.random() < 0.5:
        nodes.append(op("gelu", "aten.gelu.default", (Ref("linear"),), value(batch, hidden)))
        last = "gelu"
    nodes.append(op("mul", "aten.mul.Tensor", (Ref(last), Ref("linear")), value(batch, hidden)))
    nodes.append(op("sum", "aten.sum.default", (Ref("mul"),), value()))
    features = leaf("features", Kind.INPUT, value(batch, width, grad=False))
    return ModelGraph(
        name="random",
        batch_size=batch,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=(
            Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),)),
            Template(name="Model", pattern="", nodes=tuple(nodes), outputs=(Ref("sum"),)),
        ),
        units=(
            Unit(template=0, fqn="", inputs=()),
            Unit(template=1, fqn="", inputs=(Value(0, 0),), tensors=(("up", "up"),)),
        ),
        loss=Value(1, 0),
        tensors={"up": ParameterInfo(type=value(hidden, width))},
    )


def price_of(graph, placements, prices: Prices) -> float | None:
    """Seconds of a placement, from its lowered program; None where it is not legal."""
    mesh = prices.mesh
    try:
        program = model_program(graph, placements, mesh)
        total = 0.0
        for unit in range(1, len(graph.units)):
            for position in range(len(graph.units[unit].inputs)):
                total += sum(sum(prices.change_seconds(change)) for change in program.edge(unit, position)[1])
            lowered = program.templates[graph.units[unit].template]
            for step in lowered.steps:
                if not isinstance(step, Compute):
                    total += sum(prices.change_seconds(step.change))
                    continue
                work = local_work(step.node, step.operand_types, step.outputs)
                gpu = prices.cluster.gpu
                total += device_seconds(work.forward, gpu, dtype=work.dtype, stack=STACK)
                total += device_seconds(work.backward, gpu, dtype=work.dtype, stack=STACK, is_backward=True)
                total += sum(prices.uses_seconds(step.collectives))
            for made in lowered.tensors:
                node = lowered.template.by_name[made.ref.node]
                state = tuple(made.layout.get(axis.name, _R) for axis in mesh.axes)
                total += prices.tensor(node, state, local_type(node.output, made.layout, mesh.axes))[0]
        loss = program.templates[graph.units[-1].template].outputs[0].layout.get("tp", _R)
        return total if str(loss) in ("R", "P/R") else None
    except CannotLower:
        return None


@pytest.mark.parametrize("seed", range(40))
def test_program_equals_enumeration_of_lowered_programs(seed):
    graph, mesh = random_graph(seed), Mesh(tp=2)
    space, prices = Space(graph), Prices(mesh=mesh, cluster=CLUSTER, stack=STACK)
    built = build_problem(space, mesh.axes, ("tp",), empty_placements(graph), Rules(), prices, 1)
    assignment = solve(built.problem)
    best = None
    names = [node.name for node in graph.templates[1].nodes]
    every = [
        [choice.label[0] for choice in choices]
        for keys, choices in zip(built.keys, built.problem.choices, strict=True)
        if keys[0][0] == 1
    ]
    for labels in product(*every):
        placement = {name: {"tp": label} for name, label in zip(names, labels, strict=True)}
        weight = placement["up"]["tp"]
        used = {"n": "S(0)", "k": "S(1)", "none": "R"}.get(placement["linear"]["tp"].partition(";")[0], "R/P")
        if weight != used and not (weight == "R/P" and used.startswith("S")):
            continue  # a parameter is not gathered over tp
        price = price_of(graph, ({}, placement), prices)
        if price is not None and (best is None or price < best):
            best = price
    assert best is not None
    assert assignment.cost_seconds == pytest.approx(best, rel=1e-6)
    found = price_of(graph, built.placements(space, assignment), prices)
    assert found == pytest.approx(best, rel=1e-6)


def test_batch_factor_is_found_without_prices():
    graph = residual_mlp()
    split = find_batch_split(Space(graph))
    assert split.allows_microbatches
    block = split.placements[2]
    assert {name: labels[MICROBATCH] for name, labels in block.items()} == {
        "x": "S(0)", "up.weight": "R/P", "down.weight": "R/P", "up.linear": "d0", "gelu": "d0", "down.linear": "d0",
        "add": "d0",
    }  # fmt: skip
    assert splits_evenly(Space(graph), split.placements, Mesh(dp=2, microbatches=4))
    assert not splits_evenly(Space(graph), split.placements, Mesh(dp=4, microbatches=4))


def test_joint_solution_is_never_worse_than_axis_by_axis():
    graph, mesh = residual_mlp(batch=64, width=1024, hidden=4096), Mesh(dp=2, tp=4)
    space, rules = Space(graph), Rules(batch=find_batch_split(Space(graph)).placements)
    prices = Prices(mesh=mesh, cluster=CLUSTER, stack=STACK)
    joint = solve(build_problem(space, mesh.axes, ("dp", "tp"), empty_placements(graph), rules, prices, 1).problem)
    only_dp = Mesh(dp=2)
    first = build_problem(
        space, only_dp.axes, ("dp",), empty_placements(graph), rules,
        Prices(mesh=only_dp, cluster=CLUSTER, stack=STACK), 1,
    )  # fmt: skip
    fixed = first.placements(space, solve(first.problem))
    second = solve(build_problem(space, mesh.axes, ("tp",), fixed, rules, prices, 1).problem)
    assert joint.cost_seconds <= second.cost_seconds * (1 + 1e-9)
    assert second.cost_seconds <= joint.cost_seconds * 1.01
