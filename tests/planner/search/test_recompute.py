"""As few blocks run again as memory asks for: against every choice there is, alone and in whole searches."""

import random
from dataclasses import replace
from itertools import product

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.capture.graph import Kind, ModelGraph, ModelInput, ParameterInfo, Ref, Template, Unit, Value
from autopar.planner.checkpointing import POLICIES
from autopar.planner.search.candidates import Pins
from autopar.planner.search.recompute import Blocks, every_mix, least_seconds
from autopar.planner.search.sweep import Setting, search
from graphs import leaf, op, value
from oracle import Machine, every_plan

CLUSTER, STACK = load_cluster("h100-sxm"), load_stack("eager")


def random_blocks(rng: random.Random) -> Blocks:
    count = rng.randint(1, 4)
    selective = rng.randint(1, 9)
    return Blocks(
        units=tuple(range(count)),
        in_flight=tuple(sorted((rng.randint(1, 3) for _ in range(count)), reverse=True)),
        seconds={"none": 0.0, "selective": rng.randint(1, 5), "full": rng.randint(5, 12)},
        spared_bytes={"none": 0.0, "selective": selective, "full": selective + rng.randint(0, 9)},
        working_bytes={"none": 1, "selective": rng.randint(1, 3), "full": rng.randint(3, 5)},
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_fewest_seconds_are_those_of_every_choice(seed):
    rng = random.Random(seed)
    groups = [random_blocks(rng) for _ in range(rng.randint(1, 3))]
    needed, working = rng.randint(0, 40), rng.randint(1, 5)
    blocks = [(group, n) for group in groups for n in group.in_flight]
    best = None
    for policies in product(POLICIES, repeat=len(blocks)):
        chosen = [(group, n, policy) for (group, n), policy in zip(blocks, policies, strict=True) if policy != "none"]
        if any(group.working_bytes[policy] > working for group, _, policy in chosen):
            continue
        if sum(n * group.spared_bytes[policy] for group, n, policy in chosen) >= needed:
            seconds = sum(group.seconds[policy] for group, _, policy in chosen)
            best = seconds if best is None else min(best, seconds)
    found = least_seconds(groups, needed, working)
    assert (None if found is None else found[0]) == best


def chain(depth: int, *, batch: int, width: int) -> ModelGraph:
    """Equal blocks, each a product with a gelu behind it, and a loss."""
    shape = (batch, width)
    features = leaf("features", Kind.INPUT, value(*shape, grad=False))

    def block(name: str, *, grad: bool) -> Template:
        given = leaf("x", Kind.INPUT, value(*shape, grad=grad))
        weight = leaf("weight", Kind.PARAMETER, value(width, width))
        product_ = op("product", "aten.linear.default", (Ref("x"), Ref("weight")), value(*shape))
        nodes = (given, weight, product_, op("gelu", "aten.gelu.default", (Ref("product"),), value(*shape)))
        return Template(name=name, pattern="h.*", nodes=nodes, outputs=(Ref("gelu"),), is_module=True)

    loss = (leaf("x", Kind.INPUT, value(*shape)), op("loss", "aten.sum.default", (Ref("x"),), value()))
    templates = (
        Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),)),
        block("First", grad=False),
        block("Block", grad=True),
        Template(name="Loss", pattern="", nodes=loss, outputs=(Ref("loss"),)),
    )
    units = [Unit(template=0, fqn="", inputs=())]
    for index in range(depth):
        tensors = (("weight", f"h.{index}.weight"),)
        template = 2 if index else 1
        units.append(Unit(template=template, fqn=f"h.{index}", inputs=(Value(index, 0),), tensors=tensors))
    units.append(Unit(template=3, fqn="", inputs=(Value(depth, 0),)))
    return ModelGraph(
        name="chain",
        batch_size=batch,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=templates,
        units=tuple(units),
        loss=Value(depth + 1, 0),
        tensors={f"h.{index}.weight": ParameterInfo(type=value(width, width)) for index in range(depth)},
    )


def test_mixes_are_counts_of_equal_blocks():
    graph = chain(4, batch=8, width=16)
    mixes = list(every_mix(graph, ((0, 6),)))
    # One first block, three others: 3 * 10 choices, three of them all alike.
    assert len(mixes) == len(set(mixes)) == 27
    assert all(mix[0] == mix[5] == "none" for mix in mixes)


def compare(graph: ModelGraph, pins: Pins, limits: int, rng: random.Random) -> int:
    """Searches under limits of memory against every plan; in how many the best was one of blocks that differ."""
    cluster = replace(CLUSTER, gpu=replace(CLUSTER.gpu, overhead_bytes=0))
    machine = Machine(cluster, slowdown=(1.0, 1.0), hbm_bytes=(cluster.gpu.hbm_bytes,) * 2)
    plans = list(every_plan(graph, 2, machine, STACK, pins))
    mixed = 0
    sizes = sorted({plan.memory_bytes for plan in plans})
    for limit in rng.sample(sizes, min(limits, len(sizes))):
        fitting = [plan for plan in plans if plan.memory_bytes <= limit]
        best = min(fitting, key=lambda plan: plan.seconds)
        limited = replace(cluster, gpu=replace(cluster.gpu, hbm_bytes=limit))
        setting = Setting(
            graph=graph, gpus=2, cluster=limited, stack=STACK, precision="fp32", optimizer="adamw", pins=pins
        )
        exact = search(replace(setting, exact=True))
        assert exact.best.cost.step_seconds == pytest.approx(best.seconds, rel=1e-6), best
        default = search(setting)
        assert default.bound_seconds <= best.seconds * (1 + 1e-6)
        assert default.best.cost.step_seconds <= 1.01 * best.seconds
        alike = [plan for plan in fitting if len(set(plan.policies)) == 1]
        mixed += all(plan.seconds > best.seconds * (1 + 1e-9) for plan in alike)
    return mixed


def test_a_mix_is_the_only_best_plan_where_memory_lies_between():
    graph = chain(3, batch=4096, width=256)
    pins = Pins(mesh={"pp": 2}, microbatch_size=1024, schedule="1f1b")
    assert compare(graph, pins, 8, random.Random(0)) >= 1


# With the schedule free, another schedule is the better way to spare memory under each of these limits.
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "mixed"), [("gpipe", 1), ("1f1b", 1), (None, 0)])
def test_equals_every_choice_under_many_limits(schedule, mixed):
    graph = chain(4, batch=4096, width=256)
    pins = Pins(mesh={"pp": 2}, microbatch_size=1024, schedule=schedule)
    assert compare(graph, pins, 6, random.Random(1)) >= mixed
