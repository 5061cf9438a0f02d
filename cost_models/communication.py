"""Collectives -> seconds: latency and bandwidth per link level, for groups inside a node and across nodes.

Bytes are counted as in `CollectiveUse`: the full tensor for all_reduce and broadcast, the gathered one for all_gather,
the unreduced one for reduce_scatter, the local one for all_to_all, what is sent for send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil, gcd, log2

from .hardware import Cluster, Link, Network

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send")

# Compute runs this much longer while a collective runs beside it: they share SMs and memory bandwidth.
# Source: fits published FSDP runs on A100 and H100 (1.25 eager, 1.0 to 1.05 compiled inside a node).
OVERLAP_SLOWDOWN = 1.25
OVERLAP_SLOWDOWN_COMPILED = 1.05
GRADIENT_SYNCS = ("all_reduce", "reduce_scatter_all_gather", "parameter_server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Where the ranks of a group sit: `ranks_per_node` of them on each of `nodes` nodes.

    `groups_per_node`: how many such groups share the NICs of a node at the same time; together they own all of them.
    `boards`: how many boards of a node its ranks there lie on.
    """

    size: int
    ranks_per_node: int
    nodes: int
    groups_per_node: int
    boards: int = 1

    def __post_init__(self) -> None:
        if min(self.size, self.ranks_per_node, self.nodes, self.groups_per_node, self.boards) < 1:
            raise ValueError(f"a group has positive counts: {self}")
        if self.ranks_per_node * self.nodes < self.size:
            raise ValueError(f"{self.nodes} nodes of {self.ranks_per_node} ranks do not hold {self.size} ranks")


def axis_group(size: int, stride: int, cluster: Cluster, *, world_size: int | None = None) -> Group:
    """The group of a mesh axis: ranks b, b + stride, ... (tp has stride 1, dp stride TP, pp stride DP * TP).

    Where groups differ (an axis that does not fit into nodes evenly) the most spread one is taken: of all groups of a
    `world_size`, else of those that begin in the first `stride` ranks.
    """
    if cluster.nodes:
        return _on_nodes(((size, stride),), cluster)
    period = cluster.gpus_per_node // gcd(size * stride, cluster.gpus_per_node)
    blocks = 1 if world_size is None else min(period, max(1, world_size // (size * stride)))
    bases = tuple(block * size * stride for block in range(blocks))
    return _most_spread(size, stride, bases, cluster.gpus_per_node, _gpus_per_board(cluster))


def joint_group(extents: Sequence[tuple[int, int]], cluster: Cluster) -> Group:
    """The group of several axes together, (size, stride) of each, outermost first: those without a gap are one axis."""
    merged: list[tuple[int, int]] = []
    for size, stride in extents:
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    if cluster.nodes:
        return _on_nodes(tuple(merged), cluster)
    if len(merged) > 1:
        return _most_spread_of_several(tuple(merged), cluster.gpus_per_node, _gpus_per_board(cluster))
    return axis_group(*merged[0], cluster)


def _offsets(extents: Sequence[tuple[int, int]]) -> list[int]:
    """The ranks of a group, counted from its first."""
    offsets = [0]
    for size, stride in extents:
        offsets = [offset + i * stride for offset in offsets for i in range(size)]
    return offsets


@lru_cache(maxsize=1 << 10)
def _most_spread_of_several(extents: tuple[tuple[int, int], ...], gpus_per_node: int, gpus_per_board: int) -> Group:
    """As `_most_spread`, of groups with gaps, by counting."""
    offsets = _offsets(extents)
    starts = range(min(extents[-1][1], gpus_per_node))
    nodes, boards = max(
        (on_nodes, ceil(len({(first + offset) // gpus_per_board for offset in offsets}) / on_nodes))
        for first in starts
        for on_nodes in (len({(first + offset) // gpus_per_node for offset in offsets}),)
    )
    ranks_per_node = ceil(len(offsets) / nodes)
    outer_size, outer_stride = extents[0]
    return Group(
        size=len(offsets),
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        groups_per_node=min(max(1, gpus_per_node // ranks_per_node), outer_size * outer_stride // len(offsets)),
        boards=boards,
    )


def edge_group(stage: int, stride: int, cluster: Cluster) -> Group:
    """The two ranks of a pipeline edge, stage -> stage + 1; the ranks of a stage are `stride` = DP * TP neighbours.

    Within a node some edges cross to the next node and some do not; the slowest pair of an edge counts.
    """
    if cluster.nodes:
        return _counted([(rank, rank + stride) for rank in range(stage * stride, (stage + 1) * stride)], cluster)
    return _most_spread(2, stride, (stage * stride,), cluster.gpus_per_node, _gpus_per_board(cluster))


@lru_cache(maxsize=1 << 10)
def _on_nodes(extents: tuple[tuple[int, int], ...], cluster: Cluster) -> Group:
    """The group of some axes where nodes have different sizes, by counting all groups of the cluster."""
    offsets, world_size = _offsets(extents), len(cluster.nodes)
    starts = (r for r in range(world_size) if all(r // stride % size == 0 for size, stride in extents))
    return _counted([[first + o for o in offsets] for first in starts if first + offsets[-1] < world_size], cluster)


def _counted(groups: Sequence[Sequence[int]], cluster: Cluster) -> Group:
    """Of groups of ranks, all of one size and at work at the same time, the one on most nodes and with most beside it
    there. A smaller node has fewer NICs: as many groups there are worth more on the largest."""
    begins = (0, *accumulate(cluster.node_sizes))
    per_board = _gpus_per_board(cluster)
    on = [Counter(cluster.nodes[rank] for rank in group) for group in groups]
    crossing = Counter(node for nodes in on if len(nodes) > 1 for node in nodes)

    def beside(nodes: Counter[int]) -> int:
        if len(nodes) == 1:
            return max(1, cluster.gpus_per_node // nodes.total())
        return max(ceil(crossing[node] * cluster.gpus_per_node / cluster.node_sizes[node]) for node in nodes)

    def boards(group: Sequence[int]) -> int:
        found = {(node, (rank - begins[node]) // per_board) for rank in group for node in (cluster.nodes[rank],)}
        return max(Counter(node for node, _ in found).values())

    nodes = max(on, key=lambda nodes: (len(nodes), beside(nodes), max(nodes.values())))
    return Group(
        size=nodes.total(),
        ranks_per_node=max(nodes.values()),
        nodes=len(nodes),
        groups_per_node=beside(nodes),
        boards=max(map(boards, groups)),
    )


def _gpus_per_board(cluster: Cluster) -> int:
    boards = cluster.intra_node.boards
    return boards.gpus_per_board if boards else cluster.gpus_per_node


@lru_cache(maxsize=1 << 14)
def _most_spread(size: int, stride: int, bases: tuple[int, ...], gpus_per_node: int, gpus_per_board: int) -> Group:
    """Of the groups that start in the `stride` ranks from one of `bases`, the one on most nodes and boards."""
    nodes, boards = 1, 1
    # Starts a whole node apart are alike.
    for first in (base + i for base in bases for i in range(min(stride, gpus_per_node))):
        if stride >= gpus_per_node:
            nodes = size
            break
        last = first + (size - 1) * stride
        on_nodes = last // gpus_per_node - first // gpus_per_node + 1  # no step of less than a node passes one by
        on_boards = last // gpus_per_board - first // gpus_per_board + 1 if stride < gpus_per_board else size
        nodes = max(nodes, on_nodes)
        boards = max(boards, ceil(on_boards / on_nodes))
    ranks_per_node = ceil(size / nodes)
    beside = max(1, gpus_per_node // ranks_per_node)
    return Group(
        size=size,
        ranks_per_node=ranks_per_node,
        nodes=nodes,
        groups_per_node=min(beside, stride) if nodes > 1 else beside,  # only `stride` groups interleave
        boards=boards,
    )


def collective_seconds(op: str, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of one collective, alone on its links but for the groups beside it.

    Raises:
        ValueError: an unknown operation.
        HardwareError: the group spans nodes and the cluster has no network.
    """
    if op not in OPS:
        raise ValueError(f"unknown collective {op!r}; one of {', '.join(OPS)}")
    if group.size == 1 or num_bytes <= 0:
        return 0.0
    if group.nodes == 1:
        return _inside_node(op, num_bytes, group, cluster.intra_node)
    if cluster.inter_node is None:
        cluster.check_gpus(cluster.gpus_per_node + 1)
    assert cluster.inter_node is not None
    return _across_nodes(op, num_bytes, group, cluster.intra_node, cluster.inter_node)


def _ring_volume(op: str, size: int) -> float:
    """Bytes that each rank sends in a ring, over the bytes of the collective."""
    if op == "all_reduce":
        return 2 * (size - 1) / size
    if op in ("broadcast", "reduce", "send"):
        return 1.0
    return (size - 1) / size


def _inside_rate(rate: float, group: Group, link: Link) -> float:
    return min(rate, link.boards.bytes_per_second) if group.boards > 1 and link.boards is not None else rate


def _inside_node(op: str, num_bytes: float, group: Group, link: Link) -> float:
    measured = link.curve(op, group.size)
    if measured is not None:
        return measured.at(num_bytes)
    bandwidth = _inside_rate(link.send_bytes_per_second if op == "send" else link.bus(group.size), group, link)
    latency = link.latency_seconds
    if group.boards > 1 and link.boards is not None:
        latency += link.boards.latency_seconds
    if op == "send":
        return latency + num_bytes / bandwidth
    moving = _ring_volume(op, group.size) * num_bytes / bandwidth
    if op == "all_reduce" and link.all_reduce_bytes_per_second is not None:
        moving = min(moving, num_bytes / link.all_reduce_bytes_per_second)
    # Small messages go by a protocol that starts at once and runs at half the bandwidth.
    latency += group.size * link.latency_per_rank_seconds
    return latency + min(2 * moving, link.ramp_seconds + moving)


def _across_nodes(op: str, num_bytes: float, group: Group, link: Link, network: Network) -> float:
    share = network.node_bytes_per_second / group.groups_per_node
    inside = _inside_rate(
        link.bus(group.ranks_per_node) if group.ranks_per_node > 1 else link.send_bytes_per_second, group, link
    )
    if op == "send":
        # One rank of each group sends across, through the NICs beside it.
        own = network.nic_bytes_per_second * max(
            1, ceil(network.nics_per_node / (group.groups_per_node * group.ranks_per_node))
        )
        bandwidth = min(share, own / network.oversubscription) * network.send_fraction
        return network.latency_seconds + link.latency_seconds + num_bytes / min(bandwidth, link.send_bytes_per_second)
    bandwidth = min(share * network.efficiency_fraction, inside)
    hops = (group.nodes - 1) * network.latency_seconds + (group.size - group.nodes) * link.latency_per_rank_seconds
    if op == "all_to_all":
        outside = group.ranks_per_node * num_bytes * (group.size - group.ranks_per_node) / group.size
        within = num_bytes * (group.ranks_per_node - 1) / group.size
        return link.latency_seconds + hops + max(outside / (share * network.efficiency_fraction), within / inside)
    if op != "all_reduce":
        return link.latency_seconds + hops + _ring_volume(op, group.size) * num_bytes / bandwidth
    depth = ceil(log2(group.nodes))
    up_and_down = 2 * (depth * network.latency_seconds + group.ranks_per_node * link.latency_per_rank_seconds)
    if network.accelerates_all_reduce:
        return link.latency_seconds + up_and_down + num_bytes / min(share * network.efficiency_fraction, inside)
    ring = 2 * hops + _ring_volume(op, group.size) * num_bytes / bandwidth
    tree = up_and_down + 2 * num_bytes / bandwidth
    return link.latency_seconds + min(ring, tree)


def gradient_sync_seconds(kind: str, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds to add up gradients (and hand out parameters) of `num_bytes` over a group, by one of GRADIENT_SYNCS.

    parameter_server: every gradient is reduced to the rank that owns it and its parameter broadcast back. The owners
    take turns at their links: each of them receives from all others and sends to all others.

    Raises:
        ValueError: an unknown kind.
    """
    if kind == "all_reduce":
        return collective_seconds("all_reduce", num_bytes, group, cluster)
    if kind == "reduce_scatter_all_gather":
        return sum(collective_seconds(op, num_bytes, group, cluster) for op in ("reduce_scatter", "all_gather"))
    if kind == "parameter_server":
        part = num_bytes / group.size
        return group.size * sum(collective_seconds(op, part, group, cluster) for op in ("reduce", "broadcast"))
    raise ValueError(f"unknown gradient synchronisation {kind!r}; one of {', '.join(GRADIENT_SYNCS)}")


def overlapped_seconds(
    compute_seconds: float,
    communication_seconds: float,
    *,
    slowdown: float = OVERLAP_SLOWDOWN,
    hidden_fraction: float | None = None,
) -> float:
    """Seconds of compute and communication that start together; what overlaps slows compute down.

    `hidden_fraction`: where it was measured, what disappears of the shorter one (`Link`).
    """
    shared = min(compute_seconds, communication_seconds)
    if hidden_fraction is not None:
        return compute_seconds + communication_seconds - hidden_fraction * shared
    return max(compute_seconds + (slowdown - 1) * shared, communication_seconds)
