"""Options of operations and conversions -> what each takes on one rank in one microbatch, before any is chosen.

The prices are those of `Evaluator`, but for fusion: all counts as fused that a stack may fuse, so that no price is
above what the lowered program comes to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.work import Work
from ..capture.graph import Kind, Node, Ref, TensorType
from ..errors import CannotLower
from ..sharding.mesh import Axis
from ..sharding.placement import Layout, can_split
from ..sharding.redistribute import changes
from ..sharding.rules import Call, rule_of
from .assignment import Choice
from .kernels import kept_by_kernels, stack_work
from .prices import Prices, least_shown_fraction, saved_on_device
from .problem import Labels, State
from .space import Space

_ADD = "aten.add.Tensor"
_UNSPLIT = ("none", "grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationUse:
    """What one option of an operation takes, on one rank in one microbatch."""

    device: tuple[float, float]  # forward, backward
    host: tuple[float, float]
    messages: tuple[float, float]
    kept: tuple[tuple[Ref, int], ...]  # value, bytes
    extra_bytes: int
    result_bytes: int
    is_view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveUse:
    """What one conversion takes."""

    copies: tuple[float, float] = (0.0, 0.0)
    messages: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Uses:
    """A `Costs` that charges nothing and writes down what every option and conversion takes.

    `free_axes`: those whose messages take nothing.
    """

    space: Space
    prices: Prices
    free_axes: frozenset[str] = frozenset()
    operations: dict[tuple[int, str, Labels], OperationUse] = field(default_factory=dict, init=False)
    moves: dict[tuple[TensorType, State, State], MoveUse | None] = field(default_factory=dict, init=False)

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        gpu, stack = self.prices.cluster.gpu, self.prices.stack
        in_block = self.space.graph.templates[template].is_module
        whole = stack_work(node, operands, outputs, stack, in_block=in_block)
        work = self._least(template, node, whole)
        priced = replace(stack, fusion="eager")
        forward, backward = 0.0, 0.0
        rule = rule_of(node.op)
        if rule is not None:
            for axis, label in zip(self.prices.axes, labels, strict=True):
                if axis.name in self.free_axes:
                    continue
                uses = rule.collectives(node, label, axis.name, axis.size, operands, outputs)
                forward += sum(self.prices.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase == "forward")
                backward += sum(
                    self.prices.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase != "forward"
                )
        kept: list[tuple[Ref, int]] = []
        extra = 0
        if any(value.requires_grad for value in outputs):
            call = self._call(node, labels, outputs)
            saved = saved_on_device(node, operands, outputs, call, self.prices.kernels)
            extra = saved.extra_bytes + kept_by_kernels(node, operands, stack)
            kept += [(node.operands[i], operands[i].num_bytes) for i in saved.operands]
            kept += [(Ref(node.name, i), outputs[i].num_bytes) for i in saved.outputs]
        self.operations[template, node.name, labels] = OperationUse(
            device=(
                device_seconds(work.forward, gpu, dtype=work.dtype, stack=priced),
                device_seconds(work.backward, gpu, dtype=work.dtype, stack=priced, is_backward=True),
            ),
            host=(host_seconds(work.forward, gpu, stack=priced), host_seconds(work.backward, gpu, stack=priced)),
            messages=(forward, backward),
            kept=tuple(kept),
            extra_bytes=extra,
            result_bytes=max((value.num_bytes for value in outputs), default=0),
            is_view=not whole.forward.kernels and not whole.forward.bytes,
        )
        return 0.0, 0.0

    def _call(self, node: Node, labels: Labels, outputs: Sequence[TensorType]) -> Call | None:
        rule, axes = rule_of(node.op), self.prices.axes
        if rule is None:
            return None
        sizes = {axis.name: axis.size for axis in axes}
        return rule.localise(node, {a.name: label for a, label in zip(axes, labels, strict=True)}, outputs, sizes)

    def _least(self, template: int, node: Node, work: Work) -> Work:
        """The work where all is fused that a stack may fuse."""
        is_product = bool(work.forward.gemms or work.forward.attention_flops)
        if self.prices.stack.fusion != "eager" and not is_product:
            forward = replace(work.forward, bytes=0, kernels=max(0, work.forward.kernels - 1))
            work = Work(forward=forward, backward=replace(work.backward, bytes=0, kernels=0), dtype=work.dtype)
        if node.op == _ADD and len(node.operands) == 2:
            graph_template = self.space.graph.templates[template]
            source = graph_template.by_name[node.operands[0].node]
            if source.kind is Kind.OP and len(graph_template.type_of(node.operands[1]).shape) == 1:
                return Work(backward=work.backward, dtype=work.dtype)  # perhaps the bias of a product
        return work

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        return 0.0, 0.0

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        key = (value, source, target)
        if key not in self.moves:
            self.moves[key] = self._move(value, source, target)
        return None if self.moves[key] is None else 0.0

    def _move(self, value: TensorType, source: State, target: State) -> MoveUse | None:
        axes = self.prices.axes
        before, after = layout_of(source, axes), layout_of(target, axes)
        if not can_split(value, before, axes) or not can_split(value, after, axes):
            return None
        try:
            steps = changes(value, before, after, axes)
        except CannotLower:
            return None
        sums = [0.0, 0.0, 0.0, 0.0]
        for step in steps:
            axis = next(axis for axis in axes if axis.name == step.axis)
            if axis.is_time:
                continue
            is_free = axis.name in self.free_axes
            ahead, back = (0.0, 0.0) if is_free else self.prices.uses_seconds(step.collectives(axis))
            if axis.name == "tp":
                back *= least_shown_fraction(self.prices.stack)
            parts = (*self.prices.copies(step), ahead, back)
            sums = [old + new for old, new in zip(sums, parts, strict=True)]
        return MoveUse(copies=(sums[0], sums[1]), messages=(sums[2], sums[3]))


def splits(label: str) -> bool:
    """Whether an option's label names a factor that is split."""
    return label not in _UNSPLIT and not label.startswith("partial")


def labels_of(choice: Choice) -> Labels:
    """The label of a choice on every axis."""
    assert isinstance(choice.label, tuple)
    return choice.label


def layout_of(state: State, axes: Sequence[Axis]) -> Layout:
    """A state by the names of its axes."""
    return {axis.name: pair for axis, pair in zip(axes, state, strict=True)}
