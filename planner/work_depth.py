"""Work and depth of a captured step in flops, and in seconds on one GPU, from the prices that the search uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..cost_models.compute import work_seconds
from ..cost_models.hardware import Gpu
from ..cost_models.stacks import Stack
from ..cost_models.units import format_flops, format_seconds
from .capture.analysis import WorkDepth, analyse
from .capture.graph import Kind, ModelGraph, Node, TensorType
from .search.prices import local_work
from .tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAnalysis:
    """One step of the whole batch on one device, in two units."""

    flops: WorkDepth
    seconds: WorkDepth
    num_operations: int  # repeated blocks multiplied out
    num_folded_operations: int  # held once


def analyse_step(graph: ModelGraph, gpu: Gpu, stack: Stack) -> StepAnalysis:
    """Work and depth with every operation whole.

    Raises:
        HardwareError: the GPU has no rate for a dtype of the model.
    """

    def flops(node: Node, operands: Sequence[TensorType]) -> tuple[float, float]:
        work = local_work(node, operands, node.outputs)
        return work.forward.total_flops, work.backward.total_flops

    def seconds(node: Node, operands: Sequence[TensorType]) -> tuple[float, float]:
        return work_seconds(local_work(node, operands, node.outputs), gpu, stack)

    sizes = [len(template.of_kind(Kind.OP)) for template in graph.templates]
    return StepAnalysis(
        flops=analyse(graph, flops),
        seconds=analyse(graph, seconds),
        num_operations=sum(size * count for size, count in zip(sizes, graph.counts(), strict=True)),
        num_folded_operations=sum(sizes),
    )


def work_depth_table(found: StepAnalysis, gpu: Gpu, num_gpus: int) -> Table:
    """W, D, W/D and Brent's bounds, a column for each unit."""
    flops, seconds = found.flops, found.seconds
    bounds_flops, bounds_seconds = flops.brent_bounds(num_gpus), seconds.brent_bounds(num_gpus)
    rows = (
        ("work W", format_flops(flops.work), format_seconds(seconds.work)),
        ("  forward", format_flops(flops.forward_work), format_seconds(seconds.forward_work)),
        ("  backward", format_flops(flops.backward_work), format_seconds(seconds.backward_work)),
        ("depth D", format_flops(flops.depth), format_seconds(seconds.depth)),
        ("average parallelism W/D", f"{flops.average_parallelism:.2f}", f"{seconds.average_parallelism:.2f}"),
        (f"max(W/{num_gpus}, D), least", format_flops(bounds_flops[0]), format_seconds(bounds_seconds[0])),
        (f"W/{num_gpus} + D, greatest", format_flops(bounds_flops[1]), format_seconds(bounds_seconds[1])),
    )
    return Table(
        title=f"Whole operations on {num_gpus} GPUs, none of them split",
        columns=("", "arithmetic", f"time on {gpu.name}"),
        rows=rows,
        num_numeric=2,
    )
