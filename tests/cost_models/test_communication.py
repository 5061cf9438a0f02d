from dataclasses import replace
from itertools import product
from math import prod

import pytest
from autopar.cost_models.communication import (
    GRADIENT_SYNCS,
    OPS,
    Group,
    axis_group,
    collective_seconds,
    edge_group,
    gradient_sync_seconds,
    joint_group,
    overlapped_seconds,
)
from autopar.cost_models.errors import HardwareError
from autopar.cost_models.hardware import NodeGroup, cluster_names, load_cluster
from hypothesis import given
from hypothesis import strategies as st

H100 = load_cluster("h100-sxm")
A100 = load_cluster("a100-80g-sxm")
sizes = st.sampled_from([2, 3, 4, 6, 8, 16, 24, 64, 512])
strides = st.sampled_from([1, 2, 3, 4, 8, 16, 64])


@given(st.sampled_from(OPS), sizes, strides, st.integers(0, 2**32), st.integers(0, 2**32))
def test_costs_are_positive_and_grow_with_bytes(op: str, size: int, stride: int, a: int, b: int) -> None:
    for cluster in (H100, A100):
        group = axis_group(size, stride, cluster)
        small, large = (collective_seconds(op, n, group, cluster) for n in sorted((a, b)))
        assert 0 <= small <= large


@given(sizes, strides)
def test_all_reduce_is_about_reduce_scatter_and_all_gather(size: int, stride: int) -> None:
    for cluster in (H100, A100):
        group = axis_group(size, stride, cluster)
        reduce = collective_seconds("all_reduce", 10**10, group, cluster)
        parts = sum(collective_seconds(op, 10**10, group, cluster) for op in ("reduce_scatter", "all_gather"))
        accelerated = cluster is H100 and group.nodes == 1
        assert parts * (0.7 if accelerated else 0.9) <= reduce <= parts * 1.001


def test_a_switch_that_adds_helps_all_reduce_alone() -> None:
    group = axis_group(8, 1, H100)
    rate = {op: 10**10 * 7 / 8 / collective_seconds(op, 10**10, group, H100) for op in ("all_reduce", "all_gather")}
    assert 2 * rate["all_reduce"] > 1.2 * rate["all_gather"]
    assert collective_seconds("all_gather", 10**9, group, H100) == collective_seconds(
        "reduce_scatter", 10**9, group, H100
    )


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [
        (8, 1, Group(size=8, ranks_per_node=8, nodes=1, groups_per_node=1)),
        (2, 1, Group(size=2, ranks_per_node=2, nodes=1, groups_per_node=4)),
        (4, 2, Group(size=4, ranks_per_node=4, nodes=1, groups_per_node=2)),
        (16, 1, Group(size=16, ranks_per_node=8, nodes=2, groups_per_node=1)),
        (8, 2, Group(size=8, ranks_per_node=4, nodes=2, groups_per_node=2)),
        (4, 8, Group(size=4, ranks_per_node=1, nodes=4, groups_per_node=8)),
        (4, 64, Group(size=4, ranks_per_node=1, nodes=4, groups_per_node=8)),
    ],
)
def test_where_the_ranks_of_an_axis_sit(size: int, stride: int, expected: Group) -> None:
    assert axis_group(size, stride, H100) == expected


@given(st.integers(1, 64), st.integers(1, 64))
def test_groups_hold_their_ranks(size: int, stride: int) -> None:
    group = axis_group(size, stride, H100)
    assert group.ranks_per_node * group.nodes >= size
    assert group.ranks_per_node * group.groups_per_node <= 8
    nodes = {i * stride // 8 for i in range(size)}
    assert group.nodes >= len(nodes)


def test_groups_that_do_not_fit_into_nodes() -> None:
    assert axis_group(3, 1, H100).nodes == 1
    assert axis_group(3, 1, H100, world_size=24).nodes == 2  # ranks 6, 7, 8
    assert axis_group(2, 1, H100, world_size=24).nodes == 1


def test_pipeline_edges_cross_nodes_where_they_lie() -> None:
    assert [edge_group(stage, 4, H100).nodes for stage in range(3)] == [1, 2, 1]
    assert edge_group(1, 4, H100).groups_per_node == 4
    assert edge_group(0, 8, H100) == Group(size=2, ranks_per_node=1, nodes=2, groups_per_node=8)
    inside, across = (collective_seconds("send", 10**8, edge_group(stage, 4, H100), H100) for stage in (0, 1))
    assert across > inside


def test_counting_groups_finds_what_the_closed_forms_say() -> None:
    closed = replace(H100, groups=(NodeGroup(gpu=H100.gpu, nodes=4),))
    counted = replace(H100, groups=(NodeGroup(gpu=H100.gpu, nodes=4),))
    counted.__dict__["node_sizes"] = (8,) * 4
    assert (closed.nodes, counted.nodes[8]) == ((), 1)
    for outer, middle, inner in product((1, 2, 4, 8, 16, 32), repeat=3):
        if outer * middle * inner > 32:
            continue
        for extents in ([(middle, inner)], [(outer, middle * inner)], [(outer, middle * inner), (inner, 1)]):
            extents = [extent for extent in extents if extent[0] > 1]
            if extents:
                assert joint_group(extents, counted) == joint_group(extents, closed), extents
    for stride in (1, 2, 4, 8, 16):
        for stage in range(32 // stride - 1):
            assert edge_group(stage, stride, counted) == edge_group(stage, stride, closed)


def test_groups_on_nodes_of_different_sizes() -> None:
    sizes = (NodeGroup(gpu=H100.gpu, nodes=1), NodeGroup(gpu=H100.gpu, nodes=2, gpus_per_node=4))
    cluster = replace(H100, groups=sizes)
    # The second group of eight lies on both small nodes, which have half the NICs each.
    assert axis_group(8, 1, cluster) == Group(size=8, ranks_per_node=4, nodes=2, groups_per_node=2)
    assert axis_group(4, 1, cluster) == Group(size=4, ranks_per_node=4, nodes=1, groups_per_node=2)
    assert axis_group(4, 4, cluster) == Group(size=4, ranks_per_node=2, nodes=3, groups_per_node=8)
    assert [edge_group(stage, 4, cluster).nodes for stage in range(3)] == [1, 2, 2]
    assert H100.inter_node is not None
    alike = replace(H100, gpus_per_node=4, inter_node=replace(H100.inter_node, nics_per_node=4))
    mixed, small = (collective_seconds("all_reduce", 10**9, axis_group(4, 4, each), each) for each in (cluster, alike))
    assert mixed < small  # three nodes for four


def test_a_group_over_boards_runs_at_the_rate_between_them() -> None:
    pairs = load_cluster("h100-nvl")
    boards = [axis_group(size, stride, pairs).boards for size, stride in ((2, 1), (2, 2), (4, 1), (8, 1))]
    assert boards == [1, 2, 2, 4]
    near, far = (collective_seconds("all_reduce", 10**9, axis_group(2, stride, pairs), pairs) for stride in (1, 2))
    assert far > 2 * near
    assert axis_group(16, 1, pairs).boards == 4


def test_a_group_over_nodes_owns_all_their_nics() -> None:
    num_bytes = 10**9
    seconds = collective_seconds("all_reduce", num_bytes, axis_group(16, 1, A100), A100)
    node = 8 * 200e9 / 8
    assert 2 * 15 / 16 * num_bytes / node < seconds < 1.3 * 2 * 15 / 16 * num_bytes / node
    # eight groups of one rank a node get an eighth each
    shared = collective_seconds("all_reduce", num_bytes, axis_group(16, 8, A100), A100)
    assert 7 < shared / seconds < 9


def test_nodes_are_slower_than_one_node() -> None:
    for op in OPS:
        inside = collective_seconds(op, 10**8, axis_group(8, 1, H100), H100)
        across = collective_seconds(op, 10**8, axis_group(8, 8, H100), H100)
        assert across > inside


def test_small_messages_pay_latency_and_trees_save_it() -> None:
    wide = axis_group(512, 8, H100)
    assert H100.inter_node is not None
    assert collective_seconds("all_reduce", 8, wide, H100) < 2 * 511 * H100.inter_node.latency_seconds / 4
    assert collective_seconds("all_gather", 8, wide, H100) > 500 * H100.inter_node.latency_seconds


def test_alone_is_free() -> None:
    assert collective_seconds("all_reduce", 10**9, axis_group(1, 1, H100), H100) == 0


def test_errors() -> None:
    with pytest.raises(ValueError, match="unknown collective"):
        collective_seconds("allreduce", 1, axis_group(2, 1, H100), H100)
    local = load_cluster("cpu-local")
    with pytest.raises(HardwareError, match="one node"):
        collective_seconds("all_reduce", 1, axis_group(128, 1, local), local)
    with pytest.raises(ValueError, match="do not hold"):
        Group(size=9, ranks_per_node=4, nodes=2, groups_per_node=1)


def test_a_parameter_server_is_never_better_than_reduce_scatter() -> None:
    for size, stride in ((8, 1), (16, 8), (64, 8)):
        group = axis_group(size, stride, H100)
        seconds = {kind: gradient_sync_seconds(kind, 10**9, group, H100) for kind in GRADIENT_SYNCS}
        assert seconds["reduce_scatter_all_gather"] < seconds["parameter_server"]
    with pytest.raises(ValueError, match="unknown gradient"):
        gradient_sync_seconds("gossip", 1, group, H100)


@given(st.floats(0, 10), st.floats(0, 10))
def test_overlap_hides_communication_at_a_price(compute: float, communication: float) -> None:
    seconds = overlapped_seconds(compute, communication)
    assert max(compute, communication) <= seconds <= (compute + communication) * (1 + 1e-9)
    assert overlapped_seconds(compute, 0.0) == compute
    assert overlapped_seconds(0.0, communication) == communication


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_prices_every_collective(name: str) -> None:
    cluster = load_cluster(name)
    sizes = [2, cluster.gpus_per_node] + ([4 * cluster.gpus_per_node] if cluster.inter_node else [])
    for op in OPS:
        assert all(collective_seconds(op, 10**6, axis_group(n, 1, cluster), cluster) > 0 for n in sizes)


@pytest.mark.parametrize("gpus_per_node", [4, 8])
def test_groups_are_placed_as_by_counting_ranks(gpus_per_node: int) -> None:
    cluster = replace(load_cluster("h100-sxm"), gpus_per_node=gpus_per_node)
    for size in range(1, 40):
        for stride in range(1, 13):
            touched = [
                {(first + i * stride) // gpus_per_node for i in range(size)}
                for first in range(min(stride, gpus_per_node))
            ]
            assert axis_group(size, stride, cluster).nodes == max(map(len, touched)), (size, stride)


@pytest.mark.parametrize("extents", [((4, 2), (2, 1)), ((2, 8), (2, 4), (4, 1))])
def test_several_axes_without_a_gap_are_one(extents: tuple[tuple[int, int], ...]) -> None:
    for cluster in (H100, replace(H100, gpus_per_node=4)):
        size, stride = prod(size for size, _ in extents), extents[-1][1]
        assert joint_group(extents, cluster) == axis_group(size, stride, cluster)


@pytest.mark.parametrize(
    ("extents", "nodes", "ranks_per_node", "groups_per_node"),
    [
        (((2, 4), (2, 1)), 1, 4, 2),  # ranks 0, 1, 4, 5
        (((2, 16), (2, 1)), 2, 2, 4),  # 0, 1, 16, 17
        (((4, 16), (4, 2)), 4, 4, 2),  # 0, 2, 4, 6, 16, ...
        (((2, 32), (2, 8)), 4, 1, 8),  # 0, 8, 32, 40
    ],
)
def test_axes_with_others_between_are_placed_by_counting(
    extents: tuple[tuple[int, int], ...], nodes: int, ranks_per_node: int, groups_per_node: int
) -> None:
    group = joint_group(extents, H100)
    assert (group.nodes, group.ranks_per_node, group.groups_per_node) == (nodes, ranks_per_node, groups_per_node)


def test_groups_of_any_size_are_placed_at_once() -> None:
    assert axis_group(10**12, 1, load_cluster("h100-sxm")).nodes == 10**12 // 8
