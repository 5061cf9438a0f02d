"""The outer search on a small graph: pins, refusals, memory, runners-up."""

from dataclasses import replace
from itertools import product

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.errors import CannotLower, InfeasibleError
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.candidates import possible_meshes
from autopar.planner.search.evaluate import Evaluator
from autopar.planner.search.infeasible import explain
from autopar.planner.search.pins import Pins
from autopar.planner.search.placing import Placer
from autopar.planner.search.policies import shardings_for
from autopar.planner.search.pricing import Pricer
from autopar.planner.search.space import Space
from autopar.planner.search.stage_costs import StageCosts
from autopar.planner.search.sweep import NothingFits, Setting, search
from autopar.planner.sharding.mesh import Mesh
from graphs import residual_mlp
from oracle import shardings

CLUSTER = load_cluster("h100-sxm")


def setting(*, graph=None, gpus=8, cluster=CLUSTER, pins=None, **mesh):
    return Setting(
        graph=graph or residual_mlp(batch=64, width=512, hidden=2048, depth=7),
        gpus=gpus,
        cluster=cluster,
        stack=load_stack("eager"),
        precision="fp32",
        optimizer="adamw",
        pins=pins or Pins(mesh=mesh),
    )


def small_memory(gib: float):
    gpu = replace(CLUSTER.gpu, hbm_bytes=int(gib * 2**30), overhead_bytes=0)
    return replace(CLUSTER, gpu=gpu)


def test_the_best_of_all_meshes_is_no_worse_than_any_pinned_one():
    free = search(setting())
    for pp, dp, tp in ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 4, 2), (4, 1, 2)):
        pinned = search(setting(pp=pp, dp=dp, tp=tp))
        assert free.best.cost.step_seconds <= pinned.best.cost.step_seconds
        assert (pinned.best.mesh.pp, pinned.best.mesh.dp, pinned.best.mesh.tp) == (pp, dp, tp)
        assert pinned.bound_seconds <= pinned.best.cost.step_seconds
    assert free.bound_seconds <= free.best.cost.step_seconds


def test_a_slow_rank_leaves_out_no_mesh():
    for graph in (residual_mlp(batch=64, width=512, hidden=2048, depth=7), residual_mlp(batch=4096, width=1024)):
        free = search(replace(setting(graph=graph), slow_ranks={3: 1.4})).best
        for pp in (1, 2, 4):
            pinned = search(replace(setting(graph=graph, pp=pp, dp=8 // pp, tp=1), slow_ranks={3: 1.4})).best
            assert free.cost.step_seconds <= pinned.cost.step_seconds * 1.01


def test_predictions_add_up():
    for mesh in ({"pp": 2, "dp": 2, "tp": 2}, {"dp": 8}, {"tp": 8}):
        cost = search(setting(**mesh)).best.cost
        assert sum(cost.breakdown.values()) == pytest.approx(cost.step_seconds)
        for stage in cost.stages:
            parts = {name: size for name, size in stage.memory_bytes.items() if name != "total"}
            assert sum(parts.values()) == stage.memory_bytes["total"]


def test_single_axis_runners_up_are_priced():
    runners = search(setting()).runners_up
    best = search(setting()).best
    sizes = {(c.mesh.pp, c.mesh.dp, c.mesh.tp) for c in (*runners, best)}
    assert {(1, 8, 1), (1, 1, 8), (8, 1, 1)} <= sizes


def test_others_are_shown_at_their_best():
    # Data parallelism wins here, and bounds leave out most numbers of microbatches of the pipelines.
    graph = residual_mlp(batch=65536, width=1024, hidden=4096, depth=7)
    found = search(setting(graph=graph))
    single = [(each, {axis: 8}) for axis in ("tp", "pp") for name, each in found.baselines if name == f"{axis} only"]
    nearest = [(each, each.mesh.sizes) for each in found.runners_up if each.fits][:3]
    assert len(single) == 2
    assert any(each.mesh.pp > 1 for each, _ in nearest)
    for each, mesh in (*single, *nearest):
        assert each.cost.step_seconds <= 1.2 * search(setting(graph=graph, **mesh)).best.cost.step_seconds


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"dp": 8}, "dp=8 does not divide batch 12"),
        ({"pp": 8}, "pp=8 needs 8 pieces, the model has 3"),
        ({"dp": 3}, "has 8 ranks"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_with_the_reason(mesh, message):
    with pytest.raises(AutoparError) as error:
        search(setting(graph=residual_mlp(batch=12, depth=2), **mesh))
    assert message in str(error.value)


def test_tp_that_splits_nothing_names_the_sizes():
    graph = residual_mlp(batch=1, width=9, hidden=15, depth=2)
    with pytest.raises(AutoparError) as error:
        search(setting(graph=graph, tp=8))
    assert "tp=8 splits nothing" in str(error.value)
    assert "15" in str(error.value)


def test_memory_decides_the_policy():
    graph = residual_mlp(batch=8, width=2048, hidden=8192, depth=4)
    roomy = search(setting(graph=graph, dp=8, pins=None)).best
    tight = search(setting(graph=graph, dp=8, cluster=small_memory(1.2))).best
    assert tight.cost.memory_bytes <= 1.2 * 2**30
    assert roomy.cost.step_seconds <= tight.cost.step_seconds
    assert roomy.cost.memory_bytes > 1.2 * 2**30 > tight.cost.memory_bytes


def test_nothing_fits_says_what_would():
    graph = residual_mlp(batch=64, width=2048, hidden=8192, depth=4)
    given = setting(graph=graph, gpus=2, cluster=small_memory(0.6))
    with pytest.raises(NothingFits) as nothing:
        search(given)
    error = explain(given, nothing.value)
    assert isinstance(error, InfeasibleError)
    assert "have 0.6 GiB" in str(error)
    assert "GPUs" in error.fix


def test_pins_that_no_plan_can_have():
    for pins, message in (
        (Pins(mesh={"xp": 2}), "xp"),
        (Pins(mesh={"dp": 0}), "dp=0"),
        (Pins(mesh={}, zero=4), "ZeRO stage 4"),
        (Pins(mesh={}, activation_checkpoint="most"), "most"),
        (Pins(mesh={}, schedule="dual"), "dual"),
        (Pins(mesh={}, zero=1, zero_shard_size=2), "contradict"),
    ):
        with pytest.raises(AutoparError) as error:
            pins.check()
        assert message in str(error.value)


def test_shards_stay_within_a_node_where_that_pays():
    pins = Pins(mesh={"dp": 16}, zero=3)
    graph = residual_mlp(batch=256, width=2048, hidden=8192, depth=4)
    assert shardings_for(graph, Mesh(dp=16), pins, load_cluster("h100-sxm")) == ((3, 1), (3, 2))
    assert shardings_for(graph, Mesh(dp=16, cp=4), pins, load_cluster("h100-sxm")) == ((3, 1), (3, 8))
    assert shardings_for(graph, Mesh(dp=4, cp=8), pins, load_cluster("h100-sxm")) == ((3, 1), (3, 4))
    assert shardings_for(graph, Mesh(dp=8), pins, load_cluster("h100-sxm")) == ((3, 1),)
    free = search(setting(graph=graph, gpus=16, pins=pins)).best
    whole = search(setting(graph=graph, gpus=16, pins=replace(pins, zero_shard_size=16))).best
    near = search(setting(graph=graph, gpus=16, pins=replace(pins, zero_shard_size=8))).best
    assert (whole.mesh.replicas, near.mesh.replicas) == (1, 2)
    assert free.cost.step_seconds == min(whole.cost.step_seconds, near.cost.step_seconds)
    assert near.cost.memory_bytes > whole.cost.memory_bytes


def test_groups_of_shards_straddle_no_nodes():
    graph, free = residual_mlp(), Pins(mesh={})
    for gpus_per_node, dp, cp, tp, pp in product((1, 2, 4, 6, 8), (2, 3, 4, 6, 12), (1, 2), (1, 2, 3), (1, 2)):
        mesh, cluster = Mesh(pp=pp, dp=dp, cp=cp, tp=tp), replace(CLUSTER, gpus_per_node=gpus_per_node)
        assert shardings_for(graph, mesh, free, cluster) == tuple(shardings(mesh, cluster))
    of_four = replace(CLUSTER, gpus_per_node=4)
    assert shardings_for(graph, Mesh(dp=6, pp=2), Pins(mesh={}, zero=3), of_four) == ((3, 1), (3, 3))


def test_microbatches_fill_a_pipeline_when_pinned():
    found = search(setting(pins=Pins(mesh={"pp": 4, "dp": 2}, microbatch_size=4)))
    assert found.best.mesh.microbatches == 8
    assert found.best.schedule != "none"


def test_cp_is_offered_where_a_sample_is_all_that_dp_and_microbatches_leave():
    space = Space(residual_mlp(batch=4, length=8))
    batch = find_batch_split(space)
    found = possible_meshes(space, batch, 8, Pins(mesh={}))[0]
    of_cp = {(mesh.dp, mesh.microbatches, mesh.cp) for mesh in found if mesh.cp > 1}
    assert of_cp == {(dp, 4 // dp, cp) for dp in (1, 2, 4) for cp in (2, 4, 8) if dp * cp <= 8}
    # Where dp or the microbatch is given, dp cannot take over.
    given = possible_meshes(space, batch, 8, Pins(mesh={"dp": 2}))[0]
    assert {mesh.microbatches for mesh in given if mesh.cp > 1} == {1, 2}
    assert not [mesh for mesh in found if mesh.ep > 1]
    assert {mesh.cp for mesh in possible_meshes(space, batch, 8, Pins(mesh={"cp": 2}))[0]} == {2}
    without = Space(residual_mlp(batch=2))
    assert not [
        mesh for mesh in possible_meshes(without, find_batch_split(without), 8, Pins(mesh={}))[0] if mesh.cp > 1
    ]


@pytest.mark.parametrize(
    ("owner", "method"),
    [(Evaluator, "least_seconds"), (Pricer, "ways"), (Evaluator, "evaluate"), (StageCosts, "priced")],
)
@pytest.mark.parametrize("fault", [KeyError, ValueError])
def test_a_fault_of_pricing_is_no_reason_to_leave_a_plan_out(monkeypatch, owner, method, fault):
    monkeypatch.setattr(owner, method, lambda *_, **__: (_ for _ in ()).throw(fault("a fault of ours")))
    with pytest.raises(fault, match="a fault of ours"):
        search(setting())


def test_a_labelling_that_a_mesh_cannot_have_leaves_the_others(monkeypatch):
    taken, take, evaluator = [], Placer.taken, Pricer.evaluator

    def recorded(self, mesh, index):
        taken.append(take(self, mesh, index))
        return taken[-1]

    def refused(self, mesh, placements):
        if any(placements is each for each in taken):
            raise CannotLower("no conversion")
        return evaluator(self, mesh, placements)

    best = search(setting(gpus=4)).best
    monkeypatch.setattr(Placer, "taken", recorded)
    monkeypatch.setattr(Pricer, "evaluator", refused)
    assert (
        search(setting(gpus=4)).best.cost.step_seconds >= best.cost.step_seconds
    )  # each mesh with placements of its own
    assert taken
