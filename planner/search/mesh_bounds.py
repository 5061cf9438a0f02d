"""A lower bound on the step of every mesh.

It takes every operation at its whole size, spread evenly over all ranks (kernels get no more efficient when they get
smaller), or the host time of its launches, which no split reduces; plus fill and drain of the pipeline and the
optimizer on the smallest share of the parameters; at the pace of the slowest of all nodes. No placement, cut or policy
is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.hardware import Cluster
from ...cost_models.optimizer import optimizer_seconds
from ...cost_models.stacks import Stack
from ..capture.graph import Kind, ModelGraph
from ..schedules import least_passes
from ..sharding.mesh import Mesh
from .host_seconds import holds_dtensors
from .policies import Pipeline
from .prices import local_work, slowest_of_nodes
from .space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The step on one device with nothing split: what bounds are made of."""

    device_seconds: float
    host_seconds: float  # one microbatch: launches of every unit, forward and backward
    trained_bytes: int
    tensors_by_unit: tuple[int, ...]  # parameters that a unit trains, those of tied ones where they are first used


def whole_model(space: Space, master: ModelGraph, cluster: Cluster, stack: Stack) -> WholeModel:
    graph = space.graph
    gpu = cluster.gpu.at_best_rates()
    device = host = 0.0
    for t, template in enumerate(graph.templates):
        if t == space.prelude:
            continue
        for node in template.of_kind(Kind.OP):
            work = local_work(node, [template.type_of(ref) for ref in node.operands], node.outputs)
            ahead = device_seconds(work.forward, gpu, dtype=work.dtype, stack=stack)
            back = device_seconds(work.backward, gpu, dtype=work.dtype, stack=stack, is_backward=True)
            device += space.counts[t] * (ahead + back)
            launches = host_seconds(work.forward, gpu, stack=stack) + host_seconds(work.backward, gpu, stack=stack)
            host += space.counts[t] * launches
    trained = {fqn: info.type.num_bytes for fqn, info in master.tensors.items() if info.type.requires_grad}
    return WholeModel(
        device_seconds=device,
        host_seconds=host,
        trained_bytes=sum(trained.values()),
        tensors_by_unit=_first_uses(graph, trained),
    )


def _first_uses(graph: ModelGraph, trained: Mapping[str, int]) -> tuple[int, ...]:
    seen: set[str] = set()
    counts = []
    for unit in graph.units[1:]:
        held = {
            fqn
            for name, fqn in unit.tensors
            if fqn in trained and graph.templates[unit.template].by_name[name].output.requires_grad
        }
        counts.append(len(held - seen))
        seen |= held
    return tuple(counts)


def least_largest(counts: Sequence[int], parts: int) -> int:
    """The smallest that the largest sum can be when a sequence is cut into at most `parts` runs."""
    low, high = max((*counts, 0)), sum(counts)
    while low < high:
        middle = (low + high) // 2
        runs, room = 1, middle
        for count in counts:
            if count > room:
                runs, room = runs + 1, middle
            room -= count
        low, high = (low, middle) if runs <= parts else (middle + 1, high)
    return low


def bound_seconds(
    whole: WholeModel, mesh: Mesh, cluster: Cluster, optimizer: str, *, shards: bool, pipelines: Sequence[Pipeline]
) -> float:
    """No plan on this mesh is faster. `shards`: ZeRO may split the optimizer's work too. `pipelines`: of its plans."""
    actions = 2 * mesh.pp * cluster.gpu.pipeline_action_seconds if mesh.pp > 1 else 0.0
    through = max(whole.device_seconds / (mesh.stage_size * mesh.microbatches), whole.host_seconds + actions)
    share = whole.trained_bytes // (mesh.pp * mesh.ep * mesh.tp * (mesh.state_ranks if shards else 1))
    fullest = least_largest(whole.tensors_by_unit, mesh.pp)
    update = optimizer_seconds(
        share, cluster.gpu, optimizer=optimizer, num_tensors=fullest, sharded=holds_dtensors(mesh, 0)
    )
    started = cluster.gpu.pipeline_step_seconds if mesh.pp > 1 else 0.0
    return (started + through * fewest_passes(mesh, pipelines) + update) * slowest_of_nodes(mesh, cluster)


def fewest_passes(mesh: Mesh, pipelines: Sequence[Pipeline]) -> float:
    """What a step takes at least under the best of some pipelines, in microbatches that go through the whole model."""
    return min(least_passes(name, mesh.pp, mesh.microbatches, stages) for name, stages in pipelines)
