"""Placements that a published run fixed, by the planner's integer program: pins are prices nobody pays.

Solved once per structure of a model and tensor-parallel size; the labels then serve every batch, depth and length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import Cluster
from autopar.cost_models.stacks import Stack
from autopar.planner.capture.graph import Kind, ModelGraph, Node, TensorType
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.placements_ilp import solve
from autopar.planner.search.prices import Prices, in_precision
from autopar.planner.search.problem import Labels, State, build_problem
from autopar.planner.search.space import Rules, Space
from autopar.planner.sharding.mesh import MICROBATCH, Mesh
from autopar.planner.sharding.program import Placements

_FORBIDDEN_SECONDS = 1e3
_HIDDEN_RANK = 3  # (samples, tokens, features)
_LOSS_OP = "aten.cross_entropy_loss.default"
_EMBEDDING_OP = "aten.embedding.default"
# Operations that keep the width of the residual stream; splitting them is sequence parallelism.
_STREAM_OPS = ("aten.add.Tensor", "aten.dropout.default", "aten.layer_norm.default", "aten.rms_norm.default",
               _EMBEDDING_OP)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedCosts:
    """Prices with a fine on what the run did not do.

    sequence_parallel False: operations on the residual stream are not split. loss_is_split False: every rank of the tp
    axis has all logits.
    """

    prices: Prices
    width: int
    sequence_parallel: bool
    loss_is_split: bool

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        seconds, size = self.prices.operation(template, node, labels, operands, outputs)
        label = labels[[axis.name for axis in self.prices.axes].index("tp")] if "tp" in self._axes else "none"
        return seconds + (_FORBIDDEN_SECONDS if self._is_forbidden(node, label) else 0.0), size

    @property
    def _axes(self) -> list[str]:
        return [axis.name for axis in self.prices.axes]

    def _is_forbidden(self, node: Node, label: str) -> bool:
        if node.op == _LOSS_OP:
            return label not in (("v",) if self.loss_is_split else ("none", "grad"))
        if self.sequence_parallel or node.op not in _STREAM_OPS or len(node.output.shape) != _HIDDEN_RANK:
            return False
        return node.output.shape[-1] == self.width and label.partition(";")[0] in ("d1", "d2", "f")

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        return self.prices.tensor(node, state, local)

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        return self.prices.conversion(value, source, target)


def batch_placements(graph: ModelGraph, *, cluster: Cluster, stack: Stack) -> Placements:
    """Labels of the microbatch and dp axes: every operation splits its samples."""
    space = Space(graph)
    batch = find_batch_split(space)
    if batch.placements is None or not batch.allows_microbatches:
        raise AutoparError(f"the samples cannot be split: {batch.obstacle}", where=graph.name)
    fixed = tuple({n: {MICROBATCH: labels[MICROBATCH]} for n, labels in p.items()} for p in batch.placements)
    mesh = Mesh(pp=1, dp=2, tp=1, microbatches=2)
    prices = Prices(mesh=mesh, cluster=cluster, stack=stack)
    built = build_problem(space, mesh.axes, ("dp",), fixed, Rules(batch=batch.placements), prices, 2)
    return built.placements(space, solve(built.problem))


def tensor_placements(
    graph: ModelGraph,
    batch: Placements,
    *,
    cluster: Cluster,
    stack: Stack,
    precision: str,
    tp: int,
    width: int,
    sequence_parallel: bool,
) -> Placements:
    """`batch` with the labels of the tp axis.

    Raises:
        NoAssignment: the model cannot be split so.
    """
    if tp == 1:
        return batch
    space = Space(in_precision(graph, precision))
    mesh = Mesh(pp=1, dp=2, tp=tp, microbatches=2)
    costs = PinnedCosts(
        prices=Prices(mesh=mesh, cluster=cluster, stack=stack),
        width=width,
        sequence_parallel=sequence_parallel,
        loss_is_split=stack.loss_logits == "split",
    )
    named = tuple({n: {MICROBATCH: v[MICROBATCH]} for n, v in p.items() if MICROBATCH in v} for p in batch)
    whole = frozenset() if stack.embedding == "split" else _tables(graph)
    built = build_problem(space, mesh.axes, ("tp",), batch, Rules(batch=named, whole=whole), costs, 2)
    return built.placements(space, solve(built.problem))


def _tables(graph: ModelGraph) -> frozenset[tuple[int, str]]:
    """The parameters that embeddings look up, by template and node."""
    return frozenset(
        (index, ref.node)
        for index, template in enumerate(graph.templates)
        for node in template.nodes
        if node.op == _EMBEDDING_OP
        for ref in node.operands
        if template.by_name[ref.node].kind is Kind.PARAMETER
    )
