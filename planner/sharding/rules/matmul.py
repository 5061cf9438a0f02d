"""Matrix products: linear without bias, mm, bmm, matmul, mv, dot, outer and einsum. Every letter is a factor."""

from __future__ import annotations

from collections.abc import Callable

from ....cost_models.work import Work
from ...capture.graph import Node, TensorType
from .factors import contraction_work, factor_options
from .registry import LocalTypes, OpRule, Option, Saved, pointwise_work, register

# linear, matmul and einsum end in one of these.
_KERNELS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default", "aten.mv.default")
Lettering = Callable[[Node, LocalTypes, TensorType], tuple[list[list[str]], list[str]]]


def _linear(node: Node, operands: LocalTypes, output: TensorType) -> tuple[list[list[str]], list[str]]:
    lead = [f"d{i}" for i in range(len(operands[0].shape) - 1)]
    out = ["n"] if len(operands[1].shape) == 2 else []
    return [[*lead, "k"], [*out, "k"]], [*lead, *out]


def _matmul(node: Node, operands: LocalTypes, output: TensorType) -> tuple[list[list[str]], list[str]]:
    a, b = operands
    batch = [f"d{i}" for i in range(max(len(a.shape), len(b.shape), 2) - 2)]

    def lead(value: TensorType) -> list[str]:
        mine = batch[len(batch) - len(value.shape[:-2]) :]
        sizes = output.shape[len(batch) - len(mine) : len(batch)]
        return [name if size == out else "" for name, size, out in zip(mine, value.shape, sizes, strict=False)]

    first = [*lead(a), "m", "k"] if len(a.shape) > 1 else ["k"]
    second = [*lead(b), "k", "n"] if len(b.shape) > 1 else ["k"]
    out = [*batch, *(["m"] if len(a.shape) > 1 else []), *(["n"] if len(b.shape) > 1 else [])]
    return [first, second], out


def _fixed(line: str) -> Lettering:
    names = [part.split() for part in line.replace("->", ",").split(",")]

    def lettering(node: Node, operands: LocalTypes, output: TensorType) -> tuple[list[list[str]], list[str]]:
        return names[:-1], names[-1]

    return lettering


def _register(
    ops: tuple[str, ...], lettering: Lettering, kernels: tuple[str, ...] = (), *, reads_rows: bool = False
) -> None:
    """`reads_rows`: all dims of the first operand but the last are read as one."""

    def options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        names, out = lettering(node, operands, node.output)
        return factor_options(names, [out], operands, node.outputs)

    def work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
        names, out = lettering(node, operands, outputs[0])
        return contraction_work(names, out, operands, outputs[0])

    def saved(node: Node) -> Saved:
        """Each operand for the gradient of the other."""
        flattened = ((0, 1),) if reads_rows else ()
        return Saved(operands=(0, 1), wanted_by=((0, 1), (1, 0)), flattened=flattened)

    register(OpRule(ops=ops, options=options, work=work, saved=saved, kernels=kernels))


def _equation(node: Node) -> tuple[list[list[str]], list[str]] | None:
    """Letters of an einsum equation; None for an ellipsis, a diagonal or a sum of one operand that others lack."""
    equation = str(node.args[0]).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    left, out = equation.split("->")
    terms = [list(term) for term in left.split(",")]
    if any(len(set(term)) < len(term) for term in (*terms, list(out))):
        return None
    return terms, list(out)


def _einsum_options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    found = _equation(node)
    if found is None:
        return ()
    terms, out = found
    sizes = dict(zip(out, node.output.shape, strict=True))
    for term, value in zip(terms, operands, strict=True):
        for letter, size in zip(term, value.shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    # A dim of size one broadcasts.
    names = [
        [letter if size == sizes[letter] else "" for letter, size in zip(term, value.shape, strict=True)]
        for term, value in zip(terms, operands, strict=True)
    ]
    return factor_options(names, [out], operands, node.outputs)


def _einsum_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    found = _equation(node)
    if found is None or len(operands) != 2:
        return pointwise_work(node, operands, outputs)
    return contraction_work(found[0], found[1], operands, outputs[0])


_register(("aten.linear.default",), _linear, _KERNELS, reads_rows=True)
_register(("aten.matmul.default",), _matmul, _KERNELS)
_register(("aten.mm.default",), _fixed("m k, k n -> m n"), _KERNELS)
_register(("aten.bmm.default",), _fixed("d0 m k, d0 k n -> d0 m n"), _KERNELS)
_register(("aten.mv.default",), _fixed("m k, k -> m"))
_register(("aten.dot.default", "aten.vdot.default"), _fixed("k, k ->"))
_register(("aten.outer.default", "aten.ger.default"), _fixed("m, n -> m n"))
register(OpRule(ops=("aten.einsum.default",), options=_einsum_options, work=_einsum_work, kernels=_KERNELS))
