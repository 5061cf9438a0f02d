"""What is said where nothing fits: the shortfall, and a change that does fit when it is made."""

import re
from dataclasses import replace

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.errors import InfeasibleError
from autopar.planner.search.batch import BatchSplit
from autopar.planner.search.infeasible import explain
from autopar.planner.search.least_memory import states_of
from autopar.planner.search.pins import Pins
from autopar.planner.search.sweep import NothingFits, Setting, search
from autopar.planner.sharding.mesh import Mesh
from graphs import residual_mlp

CLUSTER, GIB = load_cluster("h100-sxm"), 2**30
PARAMETERS_GIB = 0.5  # of the graph below, in float32
PINS = {
    "the ZeRO stage": {"zero": None},
    "activation checkpointing": {"activation_checkpoint": None},
    "the microbatch size": {"microbatch_size": None},
    "the schedule": {"schedule": None},
    "the mesh": {"mesh": {}},
}


def wide(batch: int = 64):
    return residual_mlp(batch=batch, width=2048, hidden=8192, depth=4)


def setting(gib: float, *, gpus: int = 2, graph=None, overhead_gib: float = 0.0, **pins) -> Setting:
    gpu = replace(CLUSTER.gpu, hbm_bytes=int(gib * GIB), overhead_bytes=int(overhead_gib * GIB))
    return Setting(
        graph=graph or wide(),
        gpus=gpus,
        cluster=replace(CLUSTER, gpu=gpu),
        stack=load_stack("eager"),
        precision="fp32",
        optimizer="adamw",
        pins=Pins(**{"mesh": {}, **pins}),
    )


def refused(given: Setting, smaller=None) -> InfeasibleError:
    with pytest.raises(NothingFits) as nothing:
        search(given)
    return explain(given, nothing.value, smaller)


def changed(given: Setting, fix: str) -> Setting:
    """The setting with the change that the first words of a fix name."""
    if found := re.match(r"use (\d+) GPUs(?: and leave (.*) free \(not pinned\))?: ", fix):
        freed = {name: None for text in (found[2] or "").split(" and ") if text for name in PINS[text]}
        pins = replace(given.pins, mesh={}, zero=None, activation_checkpoint=None, **freed)
        return replace(given, gpus=int(found[1]), pins=pins)
    if found := re.match(r"use GPUs with (\d+) GiB \(--hbm-gib \1\): ", fix):
        cluster = replace(given.cluster, gpu=replace(given.cluster.gpu, hbm_bytes=int(found[1]) * GIB))
        return replace(given, cluster=cluster)
    if found := re.match(r"take --batch-size (\d+): ", fix):
        return replace(given, graph=wide(int(found[1])))
    if found := re.match(r"leave (.*) free \(not pinned\): ", fix):
        return replace(given, pins=replace(given.pins, **PINS[found[1]]))
    assert fix.startswith("leave all pins free: "), fix
    return replace(given, pins=Pins(mesh={}))


def shown(given: Setting, fix: str) -> Setting:
    """The same with the plan pinned that the fix shows."""
    options = dict(re.findall(r"--(mesh|zero|activation-checkpoint) (\S+)", fix))
    mesh = {axis: int(size) for axis, size in (item.split("=") for item in options["mesh"].split(","))}
    checkpoint = options["activation-checkpoint"]
    zero = int(options["zero"]) if "zero" in options else given.pins.zero
    return replace(given, pins=replace(given.pins, mesh=mesh, zero=zero, activation_checkpoint=checkpoint))


CASES = {
    "more GPUs": (setting(0.6), "use 4 GPUs: "),
    "more GPUs, and no such schedule": (
        setting(0.6, mesh={"pp": 2}, schedule="1f1b", zero=0, microbatch_size=32),
        "use 4 GPUs and leave the microbatch size and the schedule free (not pinned): ",
    ),
    "many more GPUs": (setting(0.15), "use 16 GPUs: "),
    "ZeRO": (setting(1.4, gpus=4, mesh={"dp": 4}, zero=0), "leave the ZeRO stage free"),
    "the mesh": (setting(0.6, gpus=4, mesh={"dp": 4}, zero=0), "leave the mesh free"),
    "checkpointing": (
        setting(1.3, gpus=4, graph=residual_mlp(batch=65536, width=256, hidden=1024, depth=8), mesh={"tp": 4},
                microbatch_size=65536, activation_checkpoint="none"),
        "leave activation checkpointing free",
    ),
    "the microbatch size": (
        setting(0.3, gpus=4, graph=residual_mlp(batch=65536, width=256, hidden=1024, depth=8), mesh={"tp": 4},
                microbatch_size=65536, activation_checkpoint="full"),
        "leave the microbatch size free",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if "many" in name else name for name in CASES]
)
def test_the_change_that_is_offered_fits(name):
    given, offered = CASES[name]
    error = refused(given)
    assert error.fix.startswith(offered), error
    after = changed(given, error.fix)
    assert search(after).best.fits
    best = search(shown(after, error.fix)).best
    assert best.fits
    needed = float(re.search(r" needs ([\d.]+) GiB$", error.fix)[1])
    assert needed <= after.cluster.gpu.hbm_bytes / GIB + 0.05


def test_how_much_is_missing():
    error = refused(setting(0.6))
    needs, has, short = map(
        float, re.search(r"needs ([\d.]+) GiB .* have ([\d.]+) GiB, short by ([\d.]+) GiB", str(error)).groups()
    )
    assert has == 0.6
    assert short == pytest.approx(needs - has, abs=0.11)
    assert needs >= 4 * PARAMETERS_GIB / 2  # parameters, gradients and both moments, over two GPUs


def test_little_is_missing():
    """Where both numbers would be equal in tenths of a GiB."""
    pins = {"mesh": {"dp": 2}, "zero": 0, "activation_checkpoint": "full", "microbatch_size": 32}
    with pytest.raises(NothingFits) as nothing:
        search(setting(0.6, **pins))
    room = nothing.value.least.cost.memory_bytes - 3 * 2**20
    assert re.search(r"short by 3(\.0+)? MiB ", str(refused(setting(room / GIB, **pins))))


def test_fewer_samples_where_the_batch_cannot_be_cut(monkeypatch):
    """A model whose microbatches would mix."""
    from autopar.planner.search import nearest_change, sweep

    def whole(space):
        return BatchSplit(placements=original(space).placements, obstacle="norm needs the whole batch at once")

    original = sweep.find_batch_split
    monkeypatch.setattr(sweep, "find_batch_split", whole)
    monkeypatch.setattr(nearest_change, "find_batch_split", whole)
    given = setting(1.6, graph=wide(65536))
    error = refused(given, wide)
    assert error.fix.startswith("take --batch-size ")
    assert search(changed(given, error.fix)).best.fits


def test_more_memory_is_the_last_resort():
    """A cluster of one node with all its GPUs taken."""
    given = setting(0.6)
    given = replace(given, cluster=replace(given.cluster, inter_node=None, gpus_per_node=2))
    error = refused(given)
    assert error.fix.startswith("use GPUs with ")
    assert search(changed(given, error.fix)).best.fits


def test_states_bound_every_plan():
    """The least bytes of a mesh are no more than those of its plans, whatever their ZeRO stage."""
    for mesh, stages in (({"dp": 4}, (0, 1, 2, 3)), ({"tp": 4}, (0,)), ({"pp": 2, "dp": 2}, (3,))):
        for zero in stages:
            given = setting(80.0, gpus=4, mesh=mesh, zero=zero)
            best = search(given).best
            least = states_of(given).least(Mesh(**mesh), given.pins)
            assert least <= best.cost.memory_bytes
            assert least >= 0.4 * (best.cost.memory_bytes - best.cost.rank_memory[0]["activations"])
