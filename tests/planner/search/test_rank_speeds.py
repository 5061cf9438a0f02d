"""Clusters of different devices, and stragglers: uneven cuts, and bounds that hold."""

from dataclasses import replace

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import NodeGroup, load_cluster, load_gpu
from autopar.cost_models.stacks import load_stack
from autopar.planner.search.pins import Pins
from autopar.planner.search.sweep import Setting, search
from graphs import residual_mlp

H100 = load_cluster("h100-sxm")
FAST, SLOW = load_gpu("h100-sxm"), load_gpu("a100-40g-sxm")
MIXED = replace(H100, gpus_per_node=1, groups=(NodeGroup(gpu=SLOW, nodes=1), NodeGroup(gpu=FAST, nodes=1)))


def setting(cluster=H100, *, gpus=2, depth=12, slow_ranks=None, exact=False, shares=None, **mesh):
    return Setting(
        graph=residual_mlp(batch=64, width=1024, hidden=8192, depth=depth),
        gpus=gpus,
        cluster=cluster,
        stack=load_stack("compiled"),
        precision="fp32",
        optimizer="sgd",
        pins=Pins(mesh=mesh, microbatch_size=8, batch_shares=shares),
        exact=exact,
        slow_ranks=slow_ranks or {},
    )


def num_units(found):
    return [last - first for first, last in found.best.stages]


def test_the_slower_device_gets_fewer_blocks():
    usual, mixed = search(setting(pp=2)), search(setting(MIXED, pp=2))
    assert num_units(mixed)[0] < num_units(usual)[0]
    assert usual.best.cost.step_seconds < mixed.best.cost.step_seconds
    assert mixed.best.hbm_bytes == (SLOW.hbm_bytes, FAST.hbm_bytes)
    assert mixed.bound_seconds <= mixed.best.cost.step_seconds


def test_a_group_over_both_goes_at_the_pace_of_the_slower():
    mixed = search(setting(MIXED, dp=2, shares=(1, 1))).best
    alone = search(setting(replace(H100, gpus_per_node=1, gpu=SLOW), dp=2)).best
    usual = search(setting(replace(H100, gpus_per_node=1), dp=2)).best
    assert usual.cost.step_seconds < mixed.cost.step_seconds
    assert mixed.cost.step_seconds == pytest.approx(alone.cost.step_seconds, rel=0.3)
    assert mixed.hbm_bytes == (SLOW.hbm_bytes,)


def test_the_faster_device_takes_more_of_the_batch():
    shared, even = search(setting(MIXED, dp=2)), search(setting(MIXED, dp=2, shares=(1, 1)))
    slow, fast = shared.best.mesh.shares
    assert slow < fast
    assert slow + fast == 2 * shared.best.mesh.microbatches
    assert shared.best.cost.step_seconds < even.best.cost.step_seconds
    assert shared.bound_seconds <= shared.best.cost.step_seconds
    assert not even.best.mesh.shares
    pinned = search(setting(MIXED, dp=2, shares=shared.best.mesh.shares)).best
    assert pinned.cost.step_seconds == pytest.approx(shared.best.cost.step_seconds, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_pipelines_share_the_batch_as_no_pin_does_better(schedule):
    def step(shares):
        given = setting(gpus=4, depth=6, slow_ranks={1: 1.8, 3: 2.5}, shares=shares, pp=2, dp=2)
        return search(replace(given, pins=replace(given.pins, schedule=schedule, zero=0))).best

    free = step(None)
    step_of = 2 if schedule == "interleaved" else 1
    least = 1 if schedule == "gpipe" else 2
    pinned = {(n, 8 - n): step((n, 8 - n)).cost.step_seconds for n in range(least, 9 - least, step_of)}
    assert free.cost.step_seconds == pytest.approx(min(pinned.values()), rel=1e-9)
    assert free.mesh.shares[0] > free.mesh.shares[1]
    assert free.cost.step_seconds < pinned[4, 4]


def test_a_dp_rank_with_less_memory_takes_less_of_the_batch():
    def best(cluster, shares=None):
        given = setting(cluster, gpus=4, depth=4, shares=shares, pp=2, dp=2)
        pins = replace(given.pins, schedule="gpipe", zero=0, activation_checkpoint="none")
        return search(replace(given, pins=pins))

    one = replace(H100, gpus_per_node=1)
    even = best(one, (1, 1)).best
    small = replace(FAST, name="small", hbm_bytes=even.cost.memory_bytes - 1)
    found = best(replace(one, groups=tuple(NodeGroup(gpu=gpu, nodes=1) for gpu in (FAST, small, FAST, small))))
    assert found.best.fits
    assert found.best.mesh.shares[0] > found.best.mesh.shares[1]
    assert min(found.best.hbm_bytes) == small.hbm_bytes
    assert found.bound_seconds <= found.best.cost.step_seconds


def test_a_known_slow_rank_gets_less_and_costs_less_than_it_would():
    usual, slow = search(setting(pp=2)), search(setting(pp=2, slow_ranks={1: 2.0}))
    assert num_units(slow)[1] < num_units(usual)[1]
    assert slow.best.cost.step_seconds < 2 * usual.best.cost.step_seconds
    assert slow.bound_seconds <= slow.best.cost.step_seconds


def test_memory_of_the_smaller_device_binds():
    small = replace(SLOW, hbm_bytes=int(0.45 * 2**30), overhead_bytes=0)
    cluster = replace(
        MIXED, groups=(NodeGroup(gpu=small, nodes=1), NodeGroup(gpu=replace(FAST, overhead_bytes=0), nodes=1))
    )
    found = search(setting(cluster, pp=2)).best
    assert found.fits
    assert found.cost.rank_memory[0]["total"] <= small.hbm_bytes < found.cost.rank_memory[1]["total"]


def test_default_is_close_to_exact():
    for cluster, slow in ((MIXED, {}), (H100, {0: 1.5})):
        exact = search(setting(cluster, depth=4, slow_ranks=slow, exact=True, pp=2))
        default = search(setting(cluster, depth=4, slow_ranks=slow, pp=2))
        assert exact.is_complete
        assert exact.bound_seconds <= exact.best.cost.step_seconds <= default.best.cost.step_seconds * (1 + 1e-9)
        assert default.best.cost.step_seconds <= 1.05 * exact.best.cost.step_seconds


@pytest.mark.parametrize(("slow", "message"), [({2: 1.5}, "there are 2 ranks"), ({0: 0.5}, "0.5 times")])
def test_slow_ranks_that_cannot_be(slow, message):
    with pytest.raises(AutoparError, match=message):
        search(setting(slow_ranks=slow))


def test_nodes_of_different_sizes_are_planned_for():
    """Four ranks, the last alone on its node: what would cross the nodes on every layer costs more than elsewhere."""
    groups = (NodeGroup(gpu=FAST, nodes=1, gpus_per_node=3), NodeGroup(gpu=FAST, nodes=1, gpus_per_node=1))
    uneven, whole = replace(H100, gpus_per_node=3, groups=groups), replace(H100, gpus_per_node=4)
    for mesh in ({"tp": 4}, {"dp": 4}, {"pp": 4}):
        far, near = (search(setting(cluster, gpus=4, **mesh)) for cluster in (uneven, whole))
        assert far.best.cost.step_seconds > near.best.cost.step_seconds
        assert far.bound_seconds <= far.best.cost.step_seconds
    assert all(candidate.mesh.replicas == 1 for candidate in far.runners_up)
