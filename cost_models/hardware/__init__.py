"""The hardware catalogue: one TOML file per GPU and per cluster, every number with its source."""

from .catalogue import OVERRIDES, cluster_names, cluster_with, gpu_names, load_cluster, load_gpu
from .cluster import Boards, Cluster, Link, Network, NodeGroup, cut_to
from .curve import Curve
from .gpu import AttentionCurve, GemmCurve, Gpu
from .host import HostCosts, UpdateCosts

__all__ = [
    "AttentionCurve", "Boards", "Cluster", "Curve", "GemmCurve", "Gpu", "HostCosts", "Link", "Network", "NodeGroup",
    "OVERRIDES", "UpdateCosts", "cluster_names", "cluster_with", "cut_to", "gpu_names", "load_cluster", "load_gpu",
]  # fmt: skip
