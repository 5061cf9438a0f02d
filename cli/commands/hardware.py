"""autopar hardware: the catalogue of GPUs and clusters, and this machine beside it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from ...cost_models.hardware import Cluster, cluster_names, cluster_with, gpu_names, load_cluster, load_gpu
from ...cost_models.units import format_bytes, format_bytes_per_second, format_flops_per_second
from ...planner.errors import AutoparError
from ...planner.tables import Table
from ..console import print_json, print_result, print_table
from ..options import GpusPerNode, HbmGib, IntraNode, NicGbit, NicsPerNode, given_overrides
from .hardware_profile import profile

app = typer.Typer(help="List, show and measure GPUs and clusters.", no_args_is_help=True)
app.command("profile")(profile)
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command("list")
def list_hardware(is_json: JsonOption = False) -> None:
    """List every cluster and GPU that `--cluster` and cluster files may name.

    autopar hardware list
    """
    clusters = [load_cluster(name) for name in cluster_names()]
    if is_json:
        data = {
            "clusters": [{"name": c.name, "gpu": c.gpu.name, "gpus_per_node": c.gpus_per_node} for c in clusters],
            "gpus": list(gpu_names()),
        }
        print_json(data)
        return
    rows = [
        (
            cluster.name,
            cluster.gpu.name,
            str(cluster.gpus_per_node),
            format_bytes(cluster.gpu.hbm_bytes),
            format_bytes_per_second(cluster.intra_node.bytes_per_second),
            format_bytes_per_second(cluster.inter_node.node_bytes_per_second) if cluster.inter_node else "-",
        )
        for cluster in clusters
    ]
    print_table(
        Table(
            title="Clusters",
            columns=("name", "GPU", "GPUs a node", "memory", "link a GPU", "network a node"),
            rows=tuple(rows),
            num_numeric=4,
        )
    )
    print_result("GPUs: " + ", ".join(gpu_names()))


@app.command("show")
def show(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a cluster or GPU, or the path of a cluster file.")
    ],
    hbm_gib: HbmGib = None,
    gpus_per_node: GpusPerNode = None,
    nics_per_node: NicsPerNode = None,
    nic_gbit_per_second: NicGbit = None,
    intra_node_gb_per_second: IntraNode = None,
    is_json: JsonOption = False,
) -> None:
    """Show every number of a cluster or GPU and where it comes from.

    autopar hardware show h100-sxm
    """
    # A name may be both; the cluster holds its GPU.
    is_gpu = name in gpu_names() and name not in cluster_names()
    overrides = given_overrides(
        hbm_gib=hbm_gib,
        gpus_per_node=gpus_per_node,
        nics_per_node=nics_per_node,
        nic_gbit_per_second=nic_gbit_per_second,
        intra_node_gb_per_second=intra_node_gb_per_second,
    )
    if is_gpu and overrides:
        raise AutoparError(f"{name} is a GPU; only facts of a cluster can be overridden", fix="give a cluster's name")
    entry = load_gpu(name) if is_gpu else cluster_with(name, overrides)
    if is_json:
        print_json(asdict(entry))
        return
    print_result(f"{entry.name}: {entry.description}")
    if isinstance(entry, Cluster):
        rows = [*_rows(asdict(entry), skip=("gpu", "groups", "sources", "name", "description"))]
        for group in entry.groups:
            size = group.gpus_per_node or entry.gpus_per_node
            rows.append(("groups", f"{group.nodes} nodes of {size} {group.gpu.name}"))
        print_table(_facts("Cluster", rows))
        print_table(_sources("Sources of the cluster", entry.sources))
    gpus = [group.gpu for group in entry.groups] or [entry.gpu] if isinstance(entry, Cluster) else [entry]
    for gpu in dict.fromkeys(gpus):
        print_table(_facts(f"GPU {gpu.name}", _rows(asdict(gpu), skip=("sources", "name", "description"))))
        print_table(_sources("Sources of the GPU", gpu.sources))


def _facts(title: str, rows: list[tuple[str, str]]) -> Table:
    return Table(title=title, columns=("fact", "value"), rows=tuple(rows))


def _sources(title: str, sources: tuple[tuple[str, str], ...]) -> Table:
    return Table(title=title, columns=("number", "source"), rows=sources)


def _rows(data: dict[str, object], *, skip: tuple[str, ...] = (), prefix: str = "") -> list[tuple[str, str]]:
    """Nested records flattened to dotted names, numbers with their unit for people."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if key in skip:
            continue
        if isinstance(value, dict):
            rows.extend(_rows(value, prefix=f"{prefix}{key}."))
        else:
            rows.append((prefix + key, _shown(prefix + key, value)))
    return rows


def _shown(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float | int) and not isinstance(value, bool):
        if "bytes_per_second" in name:
            return format_bytes_per_second(value)
        if "flops_per_second" in name:
            return format_flops_per_second(value)
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_seconds"):
            return f"{value * 1e6:.4g} us"
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple):
        return ", ".join(_item(name, item) for item in value) or "-"
    return str(value)


def _item(name: str, item: object) -> str:
    """One of several numbers: a rate by ranks, a measured (operation, ranks, curve), or a point of a curve."""
    match item:
        case (int(ranks), float(rate)):
            return f"{ranks} ranks {format_bytes_per_second(rate)}"
        case (str(op), int(ranks), _):
            return f"{op} of {ranks} ranks"
        case _:
            return _shown(name, item)
