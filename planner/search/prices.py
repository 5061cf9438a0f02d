"""Cluster and stack -> seconds of operations, conversions and parameters: the costs that the integer program minimises.

All prices are of one rank. Operations and conversions are priced per microbatch, parameters per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from math import gcd, log2
from typing import Any

from ...cost_models.communication import (
    OVERLAP_SLOWDOWN,
    OVERLAP_SLOWDOWN_COMPILED,
    axis_group,
    collective_seconds,
    edge_group,
    joint_group,
)
from ...cost_models.compute import device_seconds
from ...cost_models.hardware import Cluster
from ...cost_models.stacks import Stack
from ...cost_models.work import Pass, Work
from ..capture.graph import ITEM_BYTES, Kind, ModelGraph, Node, Template, TensorType
from ..errors import CannotLower
from ..schedules import Schedule
from ..sharding.mesh import Axis, Mesh
from ..sharding.placement import SUMMED_GRADIENT, can_split
from ..sharding.redistribute import Change, CollectiveUse, changes
from ..sharding.rules import rule_of
from ..sharding.rules.registry import Call, Saved, pointwise_work, saved_of
from .problem import Labels, State
from .shared import Shared

_BUCKET_BYTES = 1 << 28  # gradients are reduced in buckets of the whole model; the rate of a large one
_CAST_AND_ADDED_BYTES = 16
_PRICED_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def in_precision(graph: ModelGraph, precision: str) -> ModelGraph:
    """The graph as mixed precision runs it: float32 values, parameters included, in the compute dtype."""
    dtype = _PRICED_DTYPE[precision]
    if dtype == "float32":
        return graph

    def lowered(value: TensorType) -> TensorType:
        return replace(value, dtype=dtype) if value.dtype == "float32" else value

    def template(old: Template) -> Template:
        nodes = tuple(replace(node, outputs=tuple(map(lowered, node.outputs))) for node in old.nodes)
        return replace(old, nodes=nodes)

    return replace(graph, templates=tuple(template(old) for old in graph.templates))


def gathered_bytes(num_bytes: int, stack: Stack) -> int:
    """Bytes of a block's parameters of 16 bits as FSDP gathers them."""
    return num_bytes // 2 if stack.gathered_dtype == "float8" else num_bytes


def accumulated_bytes(dtype: str, stack: Stack, state_ranks: int) -> int:
    """Traffic of adding one number of a microbatch's gradient to the sum: in its dtype, or cast into float32, or read
    by an addition in float32, which FSDP2 does where it reduces.

    Source: reads and writes of these forms counted by hand.
    """
    is_fsdp = stack.accumulation == "unsharded gradients"
    is_cast = stack.gradient_dtype == "float32" and ITEM_BYTES[dtype] < ITEM_BYTES["float32"]
    if not is_cast or (is_fsdp and state_ranks == 1):
        return 3 * ITEM_BYTES[dtype]
    return ITEM_BYTES[dtype] + 2 * ITEM_BYTES["float32"] if is_fsdp else _CAST_AND_ADDED_BYTES


@dataclass(frozen=True)
class Prices:
    """Prices on one mesh. A `Costs` of the integer program, and what the exact evaluation adds up."""

    mesh: Mesh
    cluster: Cluster
    stack: Stack
    shared: Shared = field(default_factory=Shared)  # with the prices of other meshes on this cluster and stack
    axes: tuple[Axis, ...] = field(init=False)
    _conversions: dict[TensorType, dict[tuple[State, State], float | None]] = field(default_factory=dict, init=False)
    _extents: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", self.mesh.axes)

    @property
    def kernels(self) -> str:
        """Whose kernels run: "cpu" or "cuda"."""
        return "cpu" if self.cluster.gpu.is_host else "cuda"

    # --- building blocks ---

    def use_seconds(self, axis: str, op: str, num_bytes: int) -> float:
        """One collective over what `Mesh.extents` names, or "tied" ranks of pp."""
        extents = self._extents.get(axis) or self._find_extents(axis)
        if extents[0][0] == 1:
            return 0.0
        if op in ("send", "recv"):
            op, extents = "send", ((2, extents[-1][1]),)
        key = (op, num_bytes, extents)
        if key not in self._known:
            group = joint_group(extents, self.cluster)
            self._known[key] = collective_seconds(op, num_bytes, group, self.cluster)
        return self._known[key]

    @property
    def _known(self) -> dict[Hashable, Any]:
        return self.shared.prices

    def send_seconds(self, num_bytes: int, edge: int) -> float:
        """One message from pipeline stage `edge` to the next one (from the last to the first where they are a ring)."""
        stride = self.mesh.stride("pp")
        edge = self.alike_edge(edge)
        is_ring = edge == self.mesh.pp - 1
        key = ("edge", -1 if is_ring else edge, stride, num_bytes)
        if key not in self._known:
            group = axis_group(2, stride, self.cluster) if is_ring else edge_group(edge, stride, self.cluster)
            self._known[key] = collective_seconds("send", num_bytes, group, self.cluster)
        return self._known[key]

    def alike_edge(self, edge: int) -> int:
        """The first pipeline edge that costs the same: edges a whole node apart are alike."""
        if edge == self.mesh.pp - 1 or self.cluster.node_sizes:
            return edge
        per_node = self.cluster.gpus_per_node
        return edge % (per_node // gcd(self.mesh.stride("pp"), per_node))

    def _find_extents(self, axis: str) -> tuple[tuple[int, int], ...]:
        """(ranks, stride) of what a collective goes over, without what has one rank."""
        found = ((min(self.mesh.pp, 2), self.mesh.stride("pp")),) if axis == "tied" else self.mesh.extents(axis)
        self._extents[axis] = tuple(extent for extent in found if extent[0] > 1) or ((1, 1),)
        return self._extents[axis]

    def uses_seconds(self, uses: Sequence[CollectiveUse]) -> tuple[float, float]:
        """Forward and backward."""
        forward = sum(self.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase == "forward")
        backward = sum(self.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase == "backward")
        return forward, backward

    def work(self, node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> tuple[float, float]:
        """Forward and backward seconds of a local operation, without its inner collectives."""
        key = (node.name, node.op, node.args, node.kwargs, tuple(operands), tuple(outputs))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._device(local_work(node, operands, outputs))
        return found

    def copies(self, change: Change) -> tuple[float, float]:
        """Forward and backward seconds of the local part of a conversion: slices, pads and masks are copies."""
        moved, dtype = change.before.num_bytes + change.after.num_bytes, change.before.dtype
        has_forward = change.conversion.forward.startswith("[")
        has_backward = change.before.requires_grad and change.conversion.backward.startswith("[")
        key = ("copies", moved, dtype, has_forward, has_backward)
        if key not in self._known:
            once = Pass(bytes=moved, kernels=1)
            work = Work(
                forward=once if has_forward else Pass(), backward=once if has_backward else Pass(), dtype=dtype
            )  # fmt: skip
            self._known[key] = self._device(work)
        return self._known[key]

    def _device(self, work: Work) -> tuple[float, float]:
        """Device time: launches overlap with it, and no placement saves them; host time is counted by unit."""
        gpu, stack = self.cluster.gpu, self.stack
        return (
            device_seconds(work.forward, gpu, dtype=work.dtype, stack=stack),
            device_seconds(work.backward, gpu, dtype=work.dtype, stack=stack, is_backward=True),
        )

    # --- Costs ---

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        forward, backward = self.work(node, operands, outputs)
        rule = rule_of(node.op)
        if rule is not None:
            for axis, label in zip(self.axes, labels, strict=True):
                uses = rule.collectives(node, label, axis.name, axis.size, operands, outputs)
                forward += sum(self.uses_seconds(uses))
        return forward + backward, _saved_guess(node, operands, outputs)

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        if node.kind is not Kind.PARAMETER or not local.requires_grad:
            return 0.0, float(local.num_bytes)
        seconds = 0.0
        for axis, pair in zip(self.axes, state, strict=True):
            if pair == SUMMED_GRADIENT and not axis.is_time:
                rate = self.use_seconds(axis.name, "all_reduce", _BUCKET_BYTES) / _BUCKET_BYTES
                seconds += rate * local.num_bytes
        # The optimizer reads and writes parameter, gradient and two moments once.
        seconds += 7 * local.num_bytes / self.cluster.gpu.hbm_bytes_per_second
        return seconds, 4.0 * local.num_bytes

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        known = self._conversions.setdefault(value, {})
        if (source, target) not in known:
            known[source, target] = self._conversion(value, source, target)
        return known[source, target]

    def _conversion(self, value: TensorType, source: State, target: State) -> float | None:
        names = [axis.name for axis in self.axes]
        before, after = dict(zip(names, source, strict=True)), dict(zip(names, target, strict=True))
        if not can_split(value, before, self.axes) or not can_split(value, after, self.axes):
            return None
        try:
            steps = changes(value, before, after, self.axes)
        except CannotLower:
            return None
        return sum(sum(self.change_seconds(step)) for step in steps)

    def change_seconds(self, change: Change) -> tuple[float, float]:
        """Forward and backward seconds of one conversion."""
        forward, backward = self.uses_seconds(change.collectives(self.mesh.axis(change.axis)))
        copy_forward, copy_backward = (0.0, 0.0) if self.mesh.axis(change.axis).is_time else self.copies(change)
        return forward + copy_forward, backward + copy_backward


def local_work(node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> Work:
    rule = rule_of(node.op)
    return (pointwise_work if rule is None else rule.work)(node, operands, outputs)


def saved_on_device(
    node: Node,
    operands: Sequence[TensorType],
    outputs: Sequence[TensorType],
    call: Call | None = None,
    kernels: str = "cuda",
) -> Saved:
    """What autograd keeps of a local operation: by its local results, and by which operands have a gradient.

    `call` and `kernels`: as in `saved_of`.
    """
    return saved_of(replace(node, outputs=tuple(outputs)), operands, call, kernels)


def edge_of(schedule: Schedule, stage: int, ranks: int) -> int | None:
    """The pipeline edge between the ranks of a stage and the next, as `send_seconds` counts them; None: one rank."""
    here, there = schedule.rank_of(stage, ranks), schedule.rank_of(stage + 1, ranks)
    if here == there:
        return None
    return min(here, there) if abs(here - there) == 1 else ranks - 1  # from the last rank back to the first


def overlap_slowdown(stack: Stack) -> float:
    """How much longer compute takes while a collective runs beside it."""
    return OVERLAP_SLOWDOWN_COMPILED if stack.fusion == "compiled" else OVERLAP_SLOWDOWN


def least_shown_fraction(stack: Stack) -> float:
    """What is seen at least of a backward collective on tp that runs beside the gradient of a weight."""
    slowdown = overlap_slowdown(stack)
    return 1.0 if stack.tp_overlap == "none" else (slowdown - 1) / slowdown


def slowest_of_nodes(mesh: Mesh, cluster: Cluster) -> float:
    """By what a step grows because the slowest of many nodes sets the pace of all."""
    nodes = cluster.num_nodes(mesh.world_size)
    return 1.0 if cluster.inter_node is None or nodes <= 1 else 1 + cluster.inter_node.jitter_fraction * log2(nodes)


def _saved_guess(node: Node, operands: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
    """Bytes an operation keeps for its backward; what several operations keep is counted by each."""
    if not any(value.requires_grad for value in outputs):
        return 0.0
    saved = saved_on_device(node, operands, outputs)
    return float(
        sum(operands[i].num_bytes for i in saved.operands)
        + sum(outputs[i].num_bytes for i in saved.outputs)
        + saved.extra_bytes
    )
