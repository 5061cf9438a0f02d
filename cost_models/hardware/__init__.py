"""The hardware catalogue: one TOML file per GPU and per cluster, every number with its source."""

from .catalogue import cluster_names, gpu_names, load_cluster, load_gpu
from .cluster import Boards, Cluster, Link, Network
from .gpu import AttentionCurve, GemmCurve, Gpu

__all__ = [
    "AttentionCurve", "Boards", "Cluster", "GemmCurve", "Gpu", "Link", "Network", "cluster_names", "gpu_names",
    "load_cluster", "load_gpu",
]  # fmt: skip
