"""Which factor of every operation is the batch: the microbatch axis solved as a feasibility problem, without prices.

Microbatches split the batch in time, so only free conversions may stand between operations (docs/design.md). Where
such placements exist they say, for every node, which of its factors holds the samples; dp splits the same one and tp
leaves it alone. Where none exist (batch norm, contrastive losses) the plan has one microbatch, and the batch factor is
the one that needs the fewest bytes of conversions on dp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..capture.graph import Kind, Node, TensorType
from ..errors import CannotLower
from ..sharding.mesh import MICROBATCH, Axis, Mesh
from ..sharding.placement import can_split, parse_pair
from ..sharding.program import Placements
from ..sharding.redistribute import changes
from ..sharding.rules import rule_of
from .assignment import NoAssignment
from .placements_ilp import solve
from .problem import Labels, State, build_problem, empty_placements
from .space import Rules, Space

_SECONDS_PER_ELEMENT = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """`placements` name the batch factor under the axis "microbatch".

    `obstacle`: why there can be but one microbatch, "" if there can be more.
    """

    placements: Placements | None
    obstacle: str = ""

    @property
    def allows_microbatches(self) -> bool:
        return self.placements is not None and not self.obstacle


@dataclass(frozen=True, slots=True)
class _SplitMost:
    """Pays for every element that is computed whole, and for every byte that a conversion moves."""

    axis: Axis

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        return sum(value.numel for value in outputs) * _SECONDS_PER_ELEMENT, 0.0

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        return 0.0, 0.0

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        if self.axis.is_time:
            return 0.0
        try:
            steps = changes(value, {self.axis.name: source[0]}, {self.axis.name: target[0]}, (self.axis,))
        except CannotLower:
            return None
        moved = sum(use.num_bytes for step in steps for use in step.collectives(self.axis))
        return (1 + moved) * _SECONDS_PER_ELEMENT


def find_batch_split(space: Space) -> BatchSplit:
    """The batch factor of every node."""
    size = _smallest_factor(space.graph.batch_size)
    if size is None:
        return BatchSplit(placements=None, obstacle="the batch is one sample")
    try:
        placements = _solve(space, Axis(MICROBATCH, size))
        return BatchSplit(placements=placements)
    except NoAssignment as stuck:
        obstacle = _obstacle(space, stuck.vertex)
    try:
        on_dp = _solve(space, Axis("dp", size))
    except NoAssignment:
        return BatchSplit(placements=None, obstacle=obstacle)
    renamed = tuple(
        {name: {MICROBATCH: labels["dp"]} for name, labels in placement.items() if "dp" in labels}
        for placement in on_dp
    )
    return BatchSplit(placements=renamed, obstacle=obstacle)


def _obstacle(space: Space, vertex: str) -> str:
    """Why microbatches change the result: operations that need all samples at once, or where the split got stuck."""
    mixing = [
        f"{node.name} of {template.name}"
        for template in space.graph.templates
        for node in template.of_kind(Kind.OP)
        if (rule := rule_of(node.op)) is not None and rule.mixes_samples
    ]
    if mixing:
        others = f" and {len(mixing) - 1} more" if len(mixing) > 1 else ""
        return f"{mixing[0]}{others} needs the whole batch at once"
    return f"no operation-by-operation split of the batch exists{f' ({vertex})' if vertex else ''}"


def _solve(space: Space, axis: Axis) -> Placements:
    empty = empty_placements(space.graph)
    built = build_problem(space, (axis,), (axis.name,), empty, Rules(), _SplitMost(axis), 1)
    return built.placements(space, solve(built.problem))


def _smallest_factor(number: int) -> int | None:
    return next((k for k in range(2, number + 1) if number % k == 0), None)


def splits_evenly(space: Space, placements: Placements, mesh: Mesh) -> bool:
    """Whether dp and microbatches together divide every split of the batch."""
    axes = tuple(axis for axis in mesh.axes if axis.name in ("dp", MICROBATCH))
    together = mesh.dp * mesh.microbatches
    for t, template in enumerate(space.graph.templates):
        if t == space.prelude:
            continue
        for node in template.nodes:
            label = placements[t].get(node.name, {}).get(MICROBATCH)
            if label is None:
                continue
            if node.kind is Kind.OP:
                option = next(o for o in space.options[t, node.name] if o.label == label)
                if option.extent and option.extent % together:
                    return False
                values = (*(template.type_of(ref) for ref in node.operands), *node.outputs)
                pairs = (*option.operands, *option.outputs)
            else:
                values, pairs = node.outputs, (parse_pair(label),)
            for value, pair in zip(values, pairs, strict=True):
                if pair.is_split and not can_split(value, {axis.name: pair for axis in axes}, axes):
                    return False
    return True


__all__ = ["BatchSplit", "find_batch_split", "splits_evenly"]
