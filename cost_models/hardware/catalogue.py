"""Finds GPUs and clusters by name: one TOML file each, in gpus/ and clusters/, or a file of the user's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import HardwareError
from ..units import BITS_PER_BYTE, GB, GIB
from .cluster import GIGABIT, Cluster, Link, Network, NodeGroup, parse_link, parse_network
from .gpu import Gpu, parse_gpu
from .toml_file import Table, is_path, nearest, open_table

_FOLDER = Path(__file__).parent


def _names(folder: str) -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (_FOLDER / folder).glob("*.toml")))


def gpu_names() -> tuple[str, ...]:
    """Every GPU of the catalogue, sorted."""
    return _names("gpus")


def cluster_names() -> tuple[str, ...]:
    """Every cluster of the catalogue, sorted."""
    return _names("clusters")


def _find(name_or_path: str, folder: str, what: str) -> Path:
    if is_path(name_or_path):
        return Path(name_or_path)
    names = _names(folder)
    if folder == "clusters" and name_or_path not in names and name_or_path in gpu_names():
        raise HardwareError(
            f"{name_or_path} is a GPU, and no cluster of it is known",
            fix=f'give the path of a cluster file that has gpu = "{name_or_path}" and says how its nodes are linked',
        )
    if name_or_path not in names:
        raise HardwareError(
            f"there is no {what} {name_or_path!r}",
            fix=f"{nearest(name_or_path, names)} Or give the path of a TOML file",
        )
    return _FOLDER / folder / f"{name_or_path}.toml"


@cache
def load_gpu(name_or_path: str) -> Gpu:
    """A GPU by catalogue name or file.

    Raises:
        HardwareError: no such GPU (the nearest names are listed), or a file that makes no sense.
    """
    path = _find(name_or_path, "gpus", "GPU")
    return parse_gpu(path.stem, open_table(path))


@cache
def load_cluster(
    name_or_path: str,
    *,
    hbm_gib: float | None = None,
    gpus_per_node: int | None = None,
    nics_per_node: int | None = None,
    nic_gbit_per_second: float | None = None,
    intra_node_gb_per_second: float | None = None,
    sustained_fraction: float | None = None,
) -> Cluster:
    """A cluster by catalogue name or file, with single facts overridden.

    Raises:
        HardwareError: no such cluster (the nearest names are listed), or a file or override that makes no sense.
    """
    cluster = _parse_cluster(_find(name_or_path, "clusters", "cluster"))
    overrides = {
        "hbm_gib": hbm_gib, "gpus_per_node": gpus_per_node, "nics_per_node": nics_per_node,
        "nic_gbit_per_second": nic_gbit_per_second, "intra_node_gb_per_second": intra_node_gb_per_second,
        "sustained_fraction": sustained_fraction,
    }  # fmt: skip
    given = {name: value for name, value in overrides.items() if value is not None}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise HardwareError(f"{name} is {value}", where=cluster.name, fix="give a finite number above 0")
    if gpus_per_node is not None and cluster.node_sizes:
        raise HardwareError(
            f"gpus_per_node is given, and nodes of {cluster.name} have different numbers of GPUs",
            fix="write them into the cluster file",
        )
    boards = cluster.intra_node.boards
    if gpus_per_node is not None and boards is not None and gpus_per_node % boards.gpus_per_board:
        raise HardwareError(
            f"gpus_per_node is {gpus_per_node}; {cluster.name} has boards of {boards.gpus_per_board} GPUs",
            fix=f"give a multiple of {boards.gpus_per_board}",
        )
    return replace(
        cluster,
        gpu=_gpu_with(cluster.gpu, hbm_gib, sustained_fraction),
        groups=tuple(replace(group, gpu=_gpu_with(group.gpu, hbm_gib, sustained_fraction)) for group in cluster.groups),
        gpus_per_node=gpus_per_node or cluster.gpus_per_node,
        intra_node=_link_with(cluster.intra_node, intra_node_gb_per_second),
        inter_node=_network_with(cluster, nics_per_node, nic_gbit_per_second),
        sources=cluster.sources + tuple((name, "given by the user") for name in sorted(given)),
    )


OVERRIDES = ("hbm_gib", "gpus_per_node", "nics_per_node", "nic_gbit_per_second", "intra_node_gb_per_second")


def cluster_with(name_or_path: str, overrides: Mapping[str, float]) -> Cluster:
    """`load_cluster` with facts that came as data, of OVERRIDES.

    Raises:
        HardwareError: as `load_cluster`, or a count that is not whole.
    """
    given: dict[str, Any] = dict(overrides)
    for name in ("gpus_per_node", "nics_per_node"):
        if name in given:
            if given[name] != int(given[name]):
                raise HardwareError(f"{name} is {given[name]}", fix="give a whole number")
            given[name] = int(given[name])
    return load_cluster(name_or_path, **given)


def _gpu_with(gpu: Gpu, hbm_gib: float | None, sustained_fraction: float | None) -> Gpu:
    if sustained_fraction is not None:
        if sustained_fraction > 1:
            raise HardwareError(f"sustained_fraction is {sustained_fraction}; it must be at most 1")
        gpu = replace(gpu, sustained_fraction=sustained_fraction)
    if hbm_gib is None:
        return gpu
    if hbm_gib * GIB <= gpu.overhead_bytes:
        taken_gib = gpu.overhead_bytes / GIB
        raise HardwareError(
            f"hbm_gib is {hbm_gib}, and context and libraries take {taken_gib:.2f} GiB",
            where=gpu.name,
            fix="give the memory of the whole GPU",
        )
    return replace(gpu, hbm_bytes=int(hbm_gib * GIB))


def _link_with(link: Link, gb_per_second: float | None) -> Link:
    if gb_per_second is None:
        return link
    rate = gb_per_second * GB
    return replace(
        link,
        bytes_per_second=rate,
        send_bytes_per_second=rate,
        by_ranks=(),
        all_reduce_bytes_per_second=None,
        boards=None,
        measured=(),
    )


def _network_with(cluster: Cluster, nics: int | None, gbit_per_second: float | None) -> Network | None:
    network = cluster.inter_node
    if nics is None and gbit_per_second is None:
        return network
    if network is None:
        raise HardwareError(
            f"{cluster.name} has no network to override", fix="choose a cluster with an [inter_node] table"
        )
    if nics is not None:
        network = replace(network, nics_per_node=nics)
    if gbit_per_second is not None:
        network = replace(network, nic_bytes_per_second=gbit_per_second * GIGABIT / BITS_PER_BYTE)
    return network


@cache
def _parse_cluster(path: Path) -> Cluster:
    table = open_table(path)
    table.check_keys(("description", "gpu", "groups", "gpus_per_node", "intra_node", "inter_node"))
    gpus_per_node = table.count("gpus_per_node")
    groups = _groups_of(table, path) if table.has("groups") else ()
    if groups and (largest := max(group.gpus_per_node or gpus_per_node for group in groups)) != gpus_per_node:
        raise table.fail("gpus_per_node", f"is {gpus_per_node}, and the largest node has {largest}", f"write {largest}")
    gpu = max((group.gpu for group in groups), key=_peak) if groups else _gpu_of(table, path)
    link = parse_link(table.table("intra_node"), gpus_per_node)
    network = parse_network(table.table("inter_node")) if table.has("inter_node") else None
    return Cluster(
        name=path.stem,
        description=table.text("description"),
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        intra_node=link,
        inter_node=network,
        sources=tuple(sorted(table.sources.items())),
        groups=groups,
    )


def _groups_of(table: Table, path: Path) -> tuple[NodeGroup, ...]:
    """[[groups]] of nodes, each with its `gpu`, number of `nodes` and, where nodes have different numbers of GPUs,
    `gpus_per_node`, in the order of their ranks."""
    if table.has("gpu"):
        raise table.fail("gpu", "stands beside groups, which have a gpu each", "take one of the two out")
    if not table.has("inter_node"):
        raise table.fail("groups", "are nodes, and nothing links them", "add an [inter_node] table")
    found: list[NodeGroup] = []
    for group in table.tables("groups"):
        group.check_keys(("gpu", "nodes", "gpus_per_node"))
        size = _whole(group, "gpus_per_node", "GPUs of a node") if group.has("gpus_per_node") else 0
        found.append(NodeGroup(gpu=_gpu_of(group, path), nodes=_whole(group, "nodes", "nodes"), gpus_per_node=size))
    return tuple(found)


def _whole(group: Table, key: str, what: str) -> int:
    number = group.data.get(key)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise group.fail(key, f"is {number!r}", f"give the number of {what}, at least 1")
    return number


def _peak(gpu: Gpu) -> float:
    return max(gpu.peak_flops_per_second.values())


def _gpu_of(table: Table, path: Path) -> Gpu:
    """`gpu` is a catalogue name, a path beside the cluster's file, or a whole table."""
    if isinstance(table.data.get("gpu"), dict):
        return parse_gpu(path.stem, table.table("gpu"))
    name = table.text("gpu")
    return load_gpu(str(path.parent / name) if is_path(name) else name)
