"""From dims named by letters to options and work: the einsum form of a sharding rule.

A rule in this form names every dim of its operands and outputs, like an einsum line: linear is
`d0 d1 k, n k -> d0 d1 n`. Every name becomes an option; "" marks a dim that is never split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ....cost_models.work import Gemm, Pass, Work
from ...capture.graph import Node, TensorType
from ..placement import PARTIAL, SUMMED_GRADIENT, Pair
from .registry import Factor, Labels, LocalTypes, Option, Saved, plain_label

Names = Sequence[Sequence[str]]  # one sequence of dim names for each tensor


def aligned(operands: Sequence[TensorType], shape: tuple[int, ...]) -> list[list[str]]:
    """Dim names of operands that broadcast to `shape`: "d{i}" for output dim i, "" where an operand has size 1."""
    named = []
    for value in operands:
        first = len(shape) - len(value.shape)
        named.append([f"d{first + i}" if size == shape[first + i] else "" for i, size in enumerate(value.shape)])
    return named


def numbered_dims(shape: tuple[int, ...], never: Sequence[int] = ()) -> list[str]:
    """Names "d{i}" for every dim but those in `never`."""
    return ["" if i in never else f"d{i}" for i in range(len(shape))]


def factor_options(
    operands: Names, outputs: Names, operand_types: Sequence[TensorType], output_types: Sequence[TensorType]
) -> tuple[Option, ...]:
    """One option for every name of a dim larger than one, those of the outputs first."""
    sizes: dict[str, int] = {}
    tensors = [*zip(outputs, output_types, strict=True), *zip(operands, operand_types, strict=True)]
    for names, value in tensors:
        for name, size in zip(names, value.shape, strict=True):
            if name and sizes.setdefault(name, size) != size:
                raise ValueError(f"factor {name} has sizes {sizes[name]} and {size}")
    return tuple(
        Factor(
            label=name,
            size=size,
            operands=tuple(_place(names, name) for names in operands),
            outputs=tuple(_place(names, name) for names in outputs),
        ).option()
        for name, size in sizes.items()
        if size > 1
    )


def _place(names: Sequence[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def partial_option(node: Node, operands: Sequence[TensorType], summed: Sequence[int], label: str = "partial") -> Option:
    """The operation is linear in the operands `summed` together: these are P/R, the others R/P, outputs P/R."""
    pairs = tuple(PARTIAL if i in summed else SUMMED_GRADIENT for i in range(len(operands)))
    return Option(label=label, operands=pairs, outputs=(PARTIAL,) * len(node.outputs))


def is_summable(values: Sequence[TensorType]) -> bool:
    """Whether partial sums of these values make sense: no booleans."""
    return all(value.dtype != "bool" for value in values)


def run_option(label: str, extent: int, operands: Sequence[Pair | None], outputs: Sequence[Pair | None]) -> Option:
    """An option with grouped splits; None marks a tensor that lacks the factor."""
    return Option(
        label=label,
        operands=tuple(SUMMED_GRADIENT if p is None else p for p in operands),
        outputs=tuple(PARTIAL if p is None else p for p in outputs),
        extent=extent,
        takes_groups=True,
    )


def size_of(label: str, labels: Labels, sizes: Mapping[str, int]) -> int:
    """Over how many ranks (and microbatches) the factor `label` is split."""
    return prod(sizes[axis] for axis, chosen in labels.items() if plain_label(chosen) == label)


def contraction_work(
    operand_names: Names, output_names: Sequence[str], operands: LocalTypes, output: TensorType
) -> Work:
    """A product of two operands: one matrix product forward, one backward for each operand with a gradient."""
    sizes = {
        name: size
        for names, value in zip((*operand_names, output_names), (*operands, output), strict=True)
        for name, size in zip(names, value.shape, strict=True)
    }
    first, second = (set(names) for names in operand_names)
    out = set(output_names)

    def size(names: set[str]) -> int:
        return prod(sizes[name] for name in names if name)

    batch, k = size(first & second & out), size((first & second) - out)
    m, n = size((first - second) & out), size((second - first) & out)
    a, b = operands
    traffic = a.num_bytes + b.num_bytes + output.num_bytes
    backward = Pass()
    if a.requires_grad:
        backward += Pass(gemms=(Gemm(m, k, n, batch),), bytes=traffic, kernels=1)
    if b.requires_grad:
        backward += Pass(gemms=(Gemm(k, n, m, batch),), bytes=traffic, kernels=1)
    forward = Pass(gemms=(Gemm(m, n, k, batch),), bytes=traffic, kernels=1)
    return Work(forward=forward, backward=backward, dtype=output.dtype)


def copy_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """A copy forward; backward a copy of the gradient for the operands that want one."""
    written = sum(t.num_bytes for t in outputs)
    read = min(written, sum(t.num_bytes for t in operands))
    wanted = sum(t.num_bytes for t in operands if t.requires_grad)
    return Work(
        forward=Pass(bytes=read + written, kernels=1),
        backward=Pass(bytes=written + wanted, kernels=1) if wanted else Pass(),
        dtype=outputs[0].dtype,
    )


def free_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """A view: nothing runs."""
    return Work(dtype=outputs[0].dtype)


def view_with_copied_gradient_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """A view of a part: nothing runs forward, backward writes a gradient of the whole operand."""
    wanted = sum(t.num_bytes for t in operands if t.requires_grad)
    written = sum(t.num_bytes for t in outputs)
    backward = Pass(bytes=written + wanted, kernels=1) if wanted else Pass()
    return Work(backward=backward, dtype=outputs[0].dtype)


def saves_nothing(node: Node) -> Saved:
    return Saved()


def saves_output(node: Node) -> Saved:
    return Saved(outputs=(0,))


def reduced_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """A reduction: reads its operand once; backward writes a gradient of the operand's size."""
    read = sum(t.num_bytes for t in operands)
    numel = sum(t.numel for t in operands)
    written = sum(t.num_bytes for t in outputs)
    wanted = sum(t.num_bytes for t in operands if t.requires_grad)
    return Work(
        forward=Pass(flops=numel, bytes=read + written, kernels=1),
        backward=Pass(flops=numel, bytes=written + wanted, kernels=1) if wanted else Pass(),
        dtype=outputs[0].dtype,
    )
