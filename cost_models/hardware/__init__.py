"""The hardware catalogue: one TOML file per GPU and per cluster, every number with its source."""

from .catalogue import OVERRIDES, cluster_names, cluster_with, gpu_names, load_cluster, load_gpu
from .cluster import Boards, Cluster, Link, Network
from .gpu import AttentionCurve, GemmCurve, Gpu

__all__ = [
    "AttentionCurve", "Boards", "Cluster", "GemmCurve", "Gpu", "Link", "Network", "OVERRIDES", "cluster_names",
    "cluster_with", "gpu_names", "load_cluster", "load_gpu",
]  # fmt: skip
