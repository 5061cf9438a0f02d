"""As many blocks under ZeRO-2 as memory allows: against every choice there is."""

import random
from dataclasses import replace
from itertools import product

import pytest
from autopar.planner.capture.graph import Kind, ModelGraph, ModelInput, ParameterInfo, Ref, Template, Unit, Value
from autopar.planner.search.evaluate import Evaluator
from autopar.planner.search.pins import Pins
from autopar.planner.search.prices import Prices
from autopar.planner.search.resharding import Resharding
from autopar.planner.search.sweep import Setting, search
from graphs import chain, leaf, op, value
from limits import CLUSTER, STACK, compare

NODE = replace(CLUSTER, gpu=replace(CLUSTER.gpu, overhead_bytes=0))


def funnel(widths: list[int], *, batch: int) -> ModelGraph:
    """A block for each pair of neighbouring widths, and a loss."""
    features = leaf("features", Kind.INPUT, value(batch, widths[0], grad=False))
    templates = [Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),))]
    units = [Unit(template=0, fqn="", inputs=())]
    tensors = {}
    for i, (narrow, wide) in enumerate(zip(widths, widths[1:], strict=False)):
        weight = value(wide, narrow)
        nodes = (
            leaf("x", Kind.INPUT, value(batch, narrow, grad=i > 0)),
            leaf("weight", Kind.PARAMETER, weight),
            op("product", "aten.linear.default", (Ref("x"), Ref("weight")), value(batch, wide)),
        )
        alike = [t for t, template in enumerate(templates) if template.nodes == nodes]
        if not alike:
            name = f"Block{i}"
            templates.append(Template(name=name, pattern="h.*", nodes=nodes, outputs=(Ref("product"),), is_module=True))
        index = alike[0] if alike else len(templates) - 1
        held = (("weight", f"h.{i}.weight"),)
        units.append(Unit(template=index, fqn=f"h.{i}", inputs=(Value(i, 0),), tensors=held))
        tensors[f"h.{i}.weight"] = ParameterInfo(type=weight)
    last = len(units) - 1
    nodes = (leaf("x", Kind.INPUT, value(batch, widths[-1])), op("loss", "aten.sum.default", (Ref("x"),), value()))
    templates.append(Template(name="Loss", pattern="", nodes=nodes, outputs=(Ref("loss"),)))
    units.append(Unit(template=len(templates) - 1, fqn="", inputs=(Value(last, 0),)))
    return ModelGraph(
        name="Funnel",
        templates=tuple(templates),
        units=tuple(units),
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        tensors=tensors,
        loss=Value(len(units) - 1, 0),
        batch_size=batch,
    )


def best_under_zero_3(graph: ModelGraph, gpus: int, **mesh: int):
    pins = Pins(mesh=mesh, microbatch_size=graph.batch_size // mesh["dp"], zero=3, activation_checkpoint="none")
    setting = Setting(graph=graph, gpus=gpus, cluster=NODE, stack=STACK, precision="fp32", optimizer="adamw", pins=pins)
    return search(setting).best


@pytest.mark.parametrize(
    ("graph", "mesh"),
    [
        (funnel([512, 512, 512, 512, 512, 512], batch=256), {"dp": 2}),
        (funnel([512, 1024, 512, 1024, 1024, 256, 512], batch=256), {"dp": 2}),
        (funnel([4096, 256, 256, 256, 256, 256], batch=256), {"dp": 4}),
        (chain(6, batch=256, width=512), {"dp": 2, "pp": 2}),
    ],
)
def test_the_choice_is_the_best_of_all(graph, mesh):
    best = best_under_zero_3(graph, mesh["dp"] * mesh.get("pp", 1), **mesh)
    prices = Prices(mesh=best.mesh, cluster=NODE, stack=STACK)
    evaluator = Evaluator(graph=graph, master=graph, placements=best.placements, prices=prices, optimizer="adamw")

    def priced(zero):
        return evaluator.evaluate(best.stages, schedule=best.schedule, zero=zero, activation_checkpoint="none")

    units = graph.units[1:]
    kept = [(2, 3) if graph.templates[unit.template].is_module else (3,) for unit in units]
    every = {(3, *zero): priced((3, *zero)) for zero in product(*kept)}
    sizes = sorted({memory["total"] for cost in every.values() for memory in cost.rank_memory})
    num_mixed = 0
    for limit in (sizes[0] - 1, *sizes[:: max(1, len(sizes) // 12)], sizes[-1]):
        room = (limit,) * best.mesh.pp
        found = Resharding(evaluator, best.stages, best.schedule, "none", room).fastest()
        fitting = [cost.step_seconds for cost in every.values() if cost.memory_bytes <= limit]
        if not fitting:
            assert found is None
            continue
        chosen = priced(found)
        assert chosen.memory_bytes <= limit
        assert chosen.step_seconds == pytest.approx(min(fitting), rel=1e-9)
        num_mixed += isinstance(found, tuple)
    assert num_mixed


def test_last_blocks_are_kept_where_memory_lies_between():
    graph = chain(8, batch=256, width=1024)
    best = best_under_zero_3(graph, 2, dp=2)
    free = Pins(mesh={"dp": 2}, microbatch_size=128, activation_checkpoint="none")

    def limited(pins: Pins, hbm_bytes: int):
        node = replace(NODE, gpu=replace(NODE.gpu, hbm_bytes=hbm_bytes))
        setting = Setting(
            graph=graph, gpus=2, cluster=node, stack=STACK, precision="fp32", optimizer="adamw", pins=pins
        )
        return search(setting).best

    whole = limited(replace(free, zero=2), NODE.gpu.hbm_bytes)
    between = (best.cost.memory_bytes + whole.cost.memory_bytes) // 2
    mixed = limited(free, between)
    assert mixed.zero == (3, 3, 3, 3, 3, 3, 2, 2, 2, 3)
    assert whole.cost.step_seconds < mixed.cost.step_seconds < best.cost.step_seconds
    assert limited(replace(free, zero=3), between).zero == 3
    # With room for all blocks, all are under ZeRO-2.
    assert limited(free, whole.cost.memory_bytes).zero == 2


def zeros_of(plan):
    return plan.zeros


@pytest.mark.slow
def test_equals_every_choice_under_many_limits():
    graph = chain(4, batch=64, width=1024, has_gelu=False)
    pins = Pins(mesh={"dp": 2}, microbatch_size=32, activation_checkpoint="none")
    assert compare(graph, pins, 10, random.Random(0), zeros_of) >= 1
