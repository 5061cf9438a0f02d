"""Convolution and pooling windows along one spatial dim, and what a split of that dim needs of the neighbours.

A dim can be split where the input holds `stride` positions for every output: the windows of a rank's outputs then begin
`padding` before its inputs and end `dilation * (kernel - 1) - padding - stride + 1` behind them. Without such borders
the parts are independent; with them they are exchanged (compiler/runtime/halo.py) and one neighbour must hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ...capture.graph import ITEM_BYTES, Arg, Node, TensorType
from ..placement import split
from ..redistribute import CollectiveUse
from .factors import run_option
from .registry import AxisRef, Labels, LocalTypes, Option
from .schema import one_axis_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows along all spatial dims, which are the last ones of input and output."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    def halo(self, dim: int) -> tuple[int, int]:
        """Rows needed of the previous and of the next rank."""
        behind = self.dilation[dim] * (self.kernel[dim] - 1) - self.padding[dim] - self.stride[dim] + 1
        return self.padding[dim], max(behind, 0)

    def has_halo(self, dim: int) -> bool:
        return any(self.halo(dim))


def halo_label(dim: int) -> str:
    """The label of a split that exchanges borders; one that need not is "s0", "s1" ..."""
    return f"h{dim}"


def spatial_options(windows: Windows, operands: LocalTypes, output: TensorType) -> tuple[Option, ...]:
    """Splits of the spatial dims of operand 0; the other operands lack them."""
    found = []
    count = len(windows.kernel)
    for dim in range(count):
        size, outs = operands[0].shape[dim - count], output.shape[dim - count]
        if size != outs * windows.stride[dim]:
            continue
        pair = split(len(output.shape) - count + dim)
        if not windows.has_halo(dim):
            places = [pair, *[None] * (len(operands) - 1)]
            found.append(run_option(f"s{dim}", outs, places, [pair]))
        elif (parts := _most_parts(outs, size, max(windows.halo(dim)))) > 1:
            places = run_option("", 0, [pair, *[None] * (len(operands) - 1)], [pair])
            found.append(
                Option(
                    label=halo_label(dim),
                    operands=places.operands,
                    outputs=places.outputs,
                    extent=parts,
                    runs_collectives=True,
                    one_axis=True,
                )
            )
    return tuple(found)


def _most_parts(outs: int, size: int, halo: int) -> int:
    """The largest divisor of `outs` that leaves every part at least as long as the halo: its divisors all do."""
    return max((parts for parts in range(1, outs + 1) if outs % parts == 0 and size // parts >= halo), default=1)


def halo_axes(count: int, labels: Labels) -> tuple[AxisRef | None, ...]:
    """For every spatial dim the axis that exchanges its borders, None where there is nothing to exchange."""
    axes = (one_axis_of(labels, halo_label(dim)) for dim in range(count))
    return tuple(None if axis is None else AxisRef(axis) for axis in axes)


def extended_bytes(windows: Windows, x: TensorType, axes: Arg) -> int:
    """Bytes of an image with what it gets of its neighbours; `axes` as `halo_axes` gives them."""
    assert isinstance(axes, tuple)
    count = len(windows.kernel)
    shape = list(x.shape)
    for dim, axis in enumerate(axes):
        if axis is not None:
            shape[dim - count] += sum(windows.halo(dim))
    return prod(shape) * ITEM_BYTES[x.dtype]


def halo_collectives(
    windows: Windows, node: Node, label: str, axis: str, operands: LocalTypes, outputs: Sequence[TensorType]
) -> tuple[CollectiveUse, ...]:
    """What a rank sends for one split dim; dims before it were extended already where they are split too."""
    count = len(windows.kernel)
    labels = [halo_label(dim) for dim in range(count)]
    if label not in labels:
        return ()
    dim = labels.index(label)
    x = operands[0]
    row = x.numel // x.shape[dim - count] * ITEM_BYTES[x.dtype]
    for before in range(dim):
        size = x.shape[before - count]
        if outputs[0].shape[before - count] < node.output.shape[before - count]:
            row = row // size * (size + sum(windows.halo(before)))
    return tuple(
        CollectiveUse(op="send", axis=axis, num_bytes=rows * row, phase=phase, dtype=x.dtype)
        for phase in (("forward", "backward") if x.requires_grad else ("forward",))
        for rows in windows.halo(dim)
        if rows
    )
