"""The device mesh of sharded_model.py, and the meshes over the same ranks that ZeRO takes.

What joins axes, cuts one and puts meshes beside each other has no public name in PyTorch 2.13: `_flatten`, `_unflatten`
and `_concatenate` of `DeviceMesh` are written here and nowhere else. FSDP2 itself puts its mesh beside that of tp by
`_concatenate`, which refuses meshes of `DeviceMesh.from_group`; a second `init_device_mesh` makes communicators for all
axes again, and cannot join dp with cp where ep lies between; `DataParallelMeshDims` asks for parameters that are
DTensors on every axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....planner.sharding.mesh import Mesh
from ...text import literal, quote


def build_mesh(mesh: Mesh) -> str:
    axes = {name: size for name, size in mesh.sizes.items() if size > 1} or {"dp": 1}
    shape = ", ".join(name.upper() for name in axes) + ("," if len(axes) == 1 else "")
    return f'''\
def build_mesh(device_type: str) -> DeviceMesh:
    """The ranks of the plan, neighbours on the last axis. `device_type` is "cuda" or "cpu"."""
    return init_device_mesh(device_type, ({shape}), mesh_dim_names={literal(tuple(axes))})'''


STATES_MESH = '''\
def states_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks that hold the same parameters, whose gradients add up."""
    return mesh["dp", "cp"]._flatten("dp_cp")  # made once, then looked up'''


def states_of(axis: str) -> str:
    """The mesh that ZeRO splits states over, by the name of its axis, as source."""
    return "states_mesh(mesh)" if axis == "dp_cp" else f"mesh[{quote(axis)}]"


def replicated(axis: str) -> str:
    """The same as groups that hold all shards each."""
    return f'{states_of(axis)}._unflatten(0, (REPLICAS, {axis.upper()} // REPLICAS), ("dp_replicate", "dp_shard"))'


def beside(over: str, axes: Sequence[str], *, of_mesh: Sequence[str]) -> str:
    """The mesh of states and other axes of the model, which can be a slice where they are in the order of `of_mesh`."""
    if over in of_mesh and all(of_mesh.index(over) < of_mesh.index(axis) for axis in axes):
        return f"mesh[{', '.join(map(quote, (over, *axes)))}]"
    others = f"mesh[{', '.join(map(quote, axes))}]"
    return f"DeviceMesh._concatenate([{states_of(over)}, {others}])" if axes else states_of(over)


__all__ = ["STATES_MESH", "beside", "build_mesh", "replicated", "states_of"]
