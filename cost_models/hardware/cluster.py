"""What connects the devices: the link inside a node, the network between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd

from ..errors import HardwareError
from ..units import BITS_PER_BYTE, GB, MICROSECOND
from .curve import Curve, parse_curve
from .gpu import Gpu
from .toml_file import Table, nearest

INTRA_KINDS = ("switch", "mesh", "pcie", "host")
GIGABIT = 1e9
MEASURED_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True, slots=True, kw_only=True)
class Boards:
    """Parts of a node (two boards, bridged pairs): a group that spans several runs at the rate between them."""

    gpus_per_board: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link inside a node, as collectives see it.

    `bytes_per_second` is the bus bandwidth of a large ring collective over the whole node, per rank and direction;
    `by_ranks` has it for smaller groups (ranks -> bytes/s) where topology makes it differ.
    `all_reduce_bytes_per_second` is what all_reduce reaches where the switch itself adds (NVLS), in bytes of the tensor
    and whatever the number of ranks; nothing else gains from it. A collective over n ranks starts in
    `latency_seconds + n * latency_per_rank_seconds`; large ones need `ramp_seconds` more to fill their pipeline.
    `measured` has (operation, ranks, seconds by bytes) where the machine was profiled: those are taken as they are.
    `hidden_fraction`: how much of the shorter one disappears where compute and collectives run at the same time.
    """

    kind: str  # one of INTRA_KINDS
    bytes_per_second: float
    send_bytes_per_second: float
    latency_seconds: float
    latency_per_rank_seconds: float
    ramp_seconds: float
    by_ranks: tuple[tuple[int, float], ...] = ()
    all_reduce_bytes_per_second: float | None = None
    boards: Boards | None = None
    measured: tuple[tuple[str, int, Curve], ...] = ()
    hidden_fraction: float | None = None

    def curve(self, op: str, ranks: int) -> Curve | None:
        """The measured curve of an operation over `ranks` ranks, if there is one."""
        return next((curve for name, size, curve in self.measured if name == op and size == ranks), None)

    def bus(self, ranks: int) -> float:
        """Bus bandwidth of a group of `ranks` ranks: of the smallest listed group that is not smaller."""
        for size, rate in self.by_ranks:
            if size >= ranks:
                return rate
        return self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network between nodes. All NICs of a node together carry `node_bytes_per_second` each way.

    `efficiency_fraction` is what collectives get of it, `send_fraction` what point to point gets; `oversubscription`
    divides both (2 = a half-bandwidth tree). `accelerates_all_reduce`: switches add in the network.
    """

    nics_per_node: int
    nic_bytes_per_second: float
    efficiency_fraction: float
    send_fraction: float
    latency_seconds: float
    oversubscription: float = 1.0
    accelerates_all_reduce: bool = False
    jitter_fraction: float = 0.0

    @property
    def node_bytes_per_second(self) -> float:
        return self.nics_per_node * self.nic_bytes_per_second / self.oversubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes with the same device, as many in each. `gpus_per_node` 0: as many as the cluster says."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Cluster:
    """Nodes of `gpus_per_node` equal devices; any number of them. `inter_node` None: one node only.

    Where nodes differ, `groups` has them in the order of their ranks, and `gpu` is the device with the highest peak;
    links are shared, so they are those of the slowest. `gpus_per_node` and the NICs are then those of the largest node;
    smaller ones have NICs in proportion.

    Compared and hashed by identity: `load_cluster` returns the same object for the same arguments.
    """

    name: str
    description: str
    gpu: Gpu
    gpus_per_node: int
    intra_node: Link
    inter_node: Network | None
    sources: tuple[tuple[str, str], ...]
    groups: tuple[NodeGroup, ...] = ()

    @cached_property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices of every node, in the order of their ranks, where not all have as many; else empty."""
        sizes = [(group.gpus_per_node or self.gpus_per_node, group.nodes) for group in self.groups]
        if all(size == self.gpus_per_node for size, _ in sizes):
            return ()
        return tuple(size for size, nodes in sizes for _ in range(nodes))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node of every rank, where `node_sizes` says how many ranks there are; else empty."""
        return tuple(node for node, size in enumerate(self.node_sizes) for _ in range(size))

    @property
    def common_gpus(self) -> int:
        """The largest number that divides the devices of every node."""
        return gcd(*self.node_sizes) or self.gpus_per_node

    def node_of(self, rank: int) -> int:
        """The node of a rank; ranks fill the nodes in order."""
        return self.nodes[rank] if self.nodes else rank // self.gpus_per_node

    def num_nodes(self, gpus: int) -> float:
        """How many nodes so many devices take; a part of one where they do not fill it."""
        return self.node_of(gpus - 1) + 1 if self.nodes else gpus / self.gpus_per_node

    def gpu_of_rank(self, rank: int) -> Gpu:
        """The device of a rank."""
        node = self.node_of(rank)
        for group in self.groups:
            if node < group.nodes:
                return group.gpu
            node -= group.nodes
        return self.gpu

    def gpus_of(self, ranks: range) -> tuple[Gpu, ...]:
        """The devices of consecutive ranks, one for each node."""
        if not self.groups:
            return (self.gpu,)
        firsts = {self.node_of(rank): rank for rank in reversed(self._one_of_each(ranks))}
        return tuple(self.gpu_of_rank(rank) for rank in sorted(firsts.values()))

    def _one_of_each(self, ranks: range) -> Sequence[int]:
        """Ranks among which is one of every node that `ranks` touch."""
        return ranks if self.nodes else sorted({ranks[0], ranks[-1], *ranks[:: self.gpus_per_node]})

    def check_gpus(self, gpus: int) -> None:
        """Refuse a number of devices that this cluster cannot have.

        Raises:
            HardwareError: not positive, more than there are, nodes without a network, or nodes that are not full.
        """
        if gpus < 1:
            raise HardwareError(f"{gpus} GPUs are asked for", fix="give a positive number of GPUs")
        has = sum(group.nodes * (group.gpus_per_node or self.gpus_per_node) for group in self.groups)
        if self.groups and gpus > has:
            raise HardwareError(f"{self.name} has {has} GPUs; {gpus} are asked for", fix=f"use at most {has}")
        if gpus <= (self.node_sizes or (self.gpus_per_node,))[0]:
            return
        if self.inter_node is None:
            raise HardwareError(
                f"{self.name} is one node of {self.gpus_per_node} GPUs; {gpus} are asked for",
                fix="choose fewer GPUs or a cluster with a network",
            )
        if self.node_sizes:
            full = tuple(accumulate(self.node_sizes))
            if gpus not in full:
                at = next(index for index, end in enumerate(full) if end > gpus)
                sizes = ", ".join(map(str, self.node_sizes))
                raise HardwareError(
                    f"{gpus} GPUs do not fill nodes of {sizes} ({self.name})",
                    fix=f"use {full[at - 1]} or {full[at]} GPUs, or order the groups otherwise",
                )
        elif gpus % self.gpus_per_node:
            low = gpus // self.gpus_per_node * self.gpus_per_node
            raise HardwareError(
                f"{gpus} GPUs do not fill nodes of {self.gpus_per_node} ({self.name})",
                fix=f"use {low} or {low + self.gpus_per_node} GPUs, or another number of GPUs per node",
            )


def cut_to(cluster: Cluster, gpus: int) -> Cluster:
    """The first nodes of a cluster whose nodes have different sizes: as many as hold so many devices."""
    if not cluster.node_sizes:
        return cluster
    left, kept = gpus, []
    for group in cluster.groups:
        size = group.gpus_per_node or cluster.gpus_per_node
        if left > 0:
            kept.append(replace(group, nodes=min(group.nodes, -(-left // size))))
        left -= group.nodes * size
    return replace(cluster, groups=tuple(kept))


def parse_link(table: Table, gpus_per_node: int) -> Link:
    table.check_keys(
        ("kind", "bus_gb_per_second", "bus_gb_per_second_by_ranks", "all_reduce_gb_per_second", "send_gb_per_second")
        + ("latency_microseconds", "latency_per_rank_microseconds", "ramp_microseconds", "boards")
        + ("measured", "hidden_fraction")
    )
    kind = table.text("kind")
    if kind not in INTRA_KINDS:
        raise table.fail("kind", f"is {kind!r}", nearest(kind, INTRA_KINDS))
    bus = table.number("bus_gb_per_second") * GB
    by_ranks: tuple[tuple[int, float], ...] = ()
    if table.has("bus_gb_per_second_by_ranks"):
        rates = table.numbers("bus_gb_per_second_by_ranks")
        if len(rates) != gpus_per_node - 1:
            raise table.fail(
                "bus_gb_per_second_by_ranks",
                f"has {len(rates)} numbers",
                f"give one for each of 2..{gpus_per_node} ranks",
            )
        by_ranks = tuple((ranks, rate * GB) for ranks, rate in enumerate(rates, start=2))
    return Link(
        kind=kind,
        bytes_per_second=bus,
        send_bytes_per_second=table.number("send_gb_per_second") * GB,
        latency_seconds=table.number("latency_microseconds", is_low_ok=True) * MICROSECOND,
        latency_per_rank_seconds=table.number("latency_per_rank_microseconds", is_low_ok=True) * MICROSECOND,
        ramp_seconds=table.number("ramp_microseconds", is_low_ok=True) * MICROSECOND,
        by_ranks=by_ranks,
        all_reduce_bytes_per_second=(
            table.number("all_reduce_gb_per_second") * GB if table.has("all_reduce_gb_per_second") else None
        ),
        boards=_parse_boards(table.table("boards"), gpus_per_node) if table.has("boards") else None,
        measured=_parse_measured(table.table("measured"), gpus_per_node) if table.has("measured") else (),
        hidden_fraction=(
            table.number("hidden_fraction", is_low_ok=True, high=1.0) if table.has("hidden_fraction") else None
        ),
    )


def _parse_measured(table: Table, gpus_per_node: int) -> tuple[tuple[str, int, Curve], ...]:
    """Curves by operation and number of ranks: [measured.all_reduce.2], [measured.all_reduce.4], ..."""
    table.check_keys(MEASURED_OPS)
    found: list[tuple[str, int, Curve]] = []
    for op in table.data:
        by_ranks = table.table(op)
        for ranks in by_ranks.data:
            if not ranks.isdecimal() or not 2 <= int(ranks) <= gpus_per_node:
                raise by_ranks.fail(ranks, f"is no number of ranks from 2 to {gpus_per_node}")
            found.append((op, int(ranks), parse_curve(by_ranks.table(ranks))))
    return tuple(sorted(found, key=lambda entry: entry[:2]))


def _parse_boards(table: Table, gpus_per_node: int) -> Boards:
    table.check_keys(("gpus_per_board", "bus_gb_per_second", "latency_microseconds"))
    gpus_per_board = table.count("gpus_per_board")
    if gpus_per_node % gpus_per_board:
        raise table.fail("gpus_per_board", f"is {gpus_per_board}; it must divide the {gpus_per_node} GPUs of a node")
    return Boards(
        gpus_per_board=gpus_per_board,
        bytes_per_second=table.number("bus_gb_per_second") * GB,
        latency_seconds=table.number("latency_microseconds", is_low_ok=True) * MICROSECOND,
    )


def parse_network(table: Table) -> Network:
    table.check_keys(
        ("nics_per_node", "nic_gbit_per_second", "efficiency_fraction", "send_fraction", "latency_microseconds")
        + ("oversubscription", "accelerates_all_reduce", "jitter_fraction")
    )
    accelerates = table.data.get("accelerates_all_reduce", False)
    if not isinstance(accelerates, bool):
        raise table.fail("accelerates_all_reduce", f"must be true or false, not {accelerates!r}")
    oversubscription = table.number("oversubscription") if table.has("oversubscription") else 1.0
    if oversubscription < 1:
        raise table.fail("oversubscription", f"is {oversubscription:g}; it must be at least 1")
    return Network(
        nics_per_node=table.count("nics_per_node"),
        nic_bytes_per_second=table.number("nic_gbit_per_second") * GIGABIT / BITS_PER_BYTE,
        efficiency_fraction=table.number("efficiency_fraction", high=1.0),
        send_fraction=table.number("send_fraction", high=1.0),
        latency_seconds=table.number("latency_microseconds", is_low_ok=True) * MICROSECOND,
        oversubscription=oversubscription,
        accelerates_all_reduce=accelerates,
        jitter_fraction=table.number("jitter_fraction", is_low_ok=True, high=0.5)
        if table.has("jitter_fraction")
        else 0.0,
    )
