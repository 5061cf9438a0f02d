"""Reductions and scans: sums and means over a split dim are partial sums; every other kind keeps its own dim whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ....cost_models.work import Pass, Work
from ...capture.graph import Arg, Node
from .arguments import argument, dim_of, integers
from .factors import (
    factor_options,
    is_summable,
    numbered_dims,
    partial_option,
    reduced_work,
    saves_nothing,
    size_of,
)
from .registry import (
    Call,
    Labels,
    LocalTypes,
    OpRule,
    Option,
    Saved,
    plain_label,
    pointwise_work,
    register,
    same_call,
    saves_operands,
)

Dims = Callable[[Node, int], Sequence[int]]


def _listed(position: int, name: str = "dim") -> Dims:
    """Reduced dims from an argument: one, several, or none for all."""

    def dims(node: Node, rank: int) -> Sequence[int]:
        arg: Arg = argument(node, position, name)
        if arg is None or arg == ():
            return range(rank)
        return [dim_of(i, rank) for i in integers(arg)]

    return dims


def _one(position: int, default: int = -1) -> Dims:
    def dims(node: Node, rank: int) -> Sequence[int]:
        return [dim_of(argument(node, position, "dim", default), rank)] if rank else []

    return dims


def _every(node: Node, rank: int) -> Sequence[int]:
    return range(rank)


def _reduced(node: Node, operands: LocalTypes, dims: Sequence[int], *, contracts: bool) -> tuple[Option, ...]:
    """Dims that stay are factors of operand and outputs; reduced ones of the operand alone, where `contracts`.

    Names are the operand's dims, so that keepdim does not change them.
    """
    value = operands[0]
    names = numbered_dims(value.shape)
    if len(node.output.shape) == len(value.shape):
        out = ["" if i in dims else name for i, name in enumerate(names)]
    else:
        out = [name for i, name in enumerate(names) if i not in dims]
    mine = [name if contracts or i not in dims else "" for i, name in enumerate(names)]
    rest = [[""] * len(other.shape) for other in operands[1:]]
    return factor_options([mine, *rest], [out] * len(node.outputs), operands, node.outputs)


def _summing(dims: Dims) -> Callable[[Node, LocalTypes], tuple[Option, ...]]:
    def options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        found = _reduced(node, operands, dims(node, len(operands[0].shape)), contracts=True)
        if is_summable(operands):
            return (*found, partial_option(node, operands, (0,)))
        return found

    return options


def _counted(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    return _reduced(node, operands, _listed(1)(node, len(operands[0].shape)), contracts=True)


def _choosing(dims: Dims) -> Callable[[Node, LocalTypes], tuple[Option, ...]]:
    def options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        return _reduced(node, operands, dims(node, len(operands[0].shape)), contracts=False)

    return options


def _scanning(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    own = dim_of(node.args[1], len(operands[0].shape))
    names = numbered_dims(operands[0].shape, (own,))
    found = factor_options([names], [names] * len(node.outputs), operands, node.outputs)
    if node.op == "aten.cumsum.default" and is_summable(operands):
        return (*found, partial_option(node, operands, (0,)))
    return found


def _sorting(position: int) -> Callable[[Node, LocalTypes], tuple[Option, ...]]:
    """sort, argsort, topk, kthvalue ...: all outputs keep the rank; their own dim may have another size."""

    def options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
        rank = len(operands[0].shape)
        own = dim_of(argument(node, position, "dim", -1), rank)
        names = numbered_dims(operands[0].shape, (own,))
        return factor_options([names], [names] * len(node.outputs), operands, node.outputs)

    return options


def _localise_mean(dims: Dims) -> Callable[[Node, Labels, LocalTypes, Mapping[str, int]], Call]:
    """A mean over a split dim: the mean of the local part, divided by the number of parts, as a partial sum."""

    def localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
        kept = _kept_labels(node, dims)
        parts = 1
        for label in {plain_label(label) for label in labels.values()}:
            if label.startswith("d") and label not in kept:
                parts *= size_of(label, labels, sizes)
        return replace(same_call(node, labels, outputs, sizes), divide_by=parts)

    return localise


def _kept_labels(node: Node, dims: Dims) -> set[str]:
    if dims is _every:
        return set()
    arg = argument(node, 1, "dim")
    if arg is None or arg == ():
        return set()
    rank = len(node.output.shape)
    keeps = bool(argument(node, 2, "keepdim", False))
    reduced = integers(arg)
    rank = rank if keeps else rank + len(reduced)
    gone = {dim_of(i, rank) for i in reduced}
    return {f"d{i}" for i in range(rank) if i not in gone}


def _expanding_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Sums: backward only expands the gradient, which is free; a mean scales it first, in one small kernel."""
    work = reduced_work(node, operands, outputs)
    wanted = any(value.requires_grad for value in operands)
    scaled = Pass(flops=outputs[0].numel, bytes=2 * outputs[0].num_bytes, kernels=1)
    is_mean = node.op.startswith("aten.mean")
    return Work(forward=work.forward, backward=scaled if wanted and is_mean else Pass(), dtype=work.dtype)


def _saves_both(node: Node) -> Saved:
    return Saved(operands=(0,), outputs=(0,))


def _saves_indices(node: Node) -> Saved:
    return Saved(outputs=(1,))


def _register(
    *ops: str,
    dims: Dims,
    kind: Callable[[Dims], Callable[[Node, LocalTypes], tuple[Option, ...]]],
    saved: Callable[[Node], Saved] = saves_operands,
) -> None:
    register(OpRule(ops=ops, options=kind(dims), work=reduced_work, saved=saved))


register(OpRule(ops=("aten.sum.default",), options=_summing(_every), work=_expanding_work, saved=saves_nothing))
register(OpRule(ops=("aten.sum.dim_IntList",), options=_summing(_listed(1)), work=_expanding_work, saved=saves_nothing))
for _name, _dims in (("aten.mean.default", _every), ("aten.mean.dim", _listed(1))):
    register(
        OpRule(
            ops=(_name,),
            options=_summing(_dims),
            work=_expanding_work,
            saved=saves_nothing,
            localise=_localise_mean(_dims),
        )
    )
register(
    OpRule(
        ops=("aten.count_nonzero.dim_IntList", "aten.count_nonzero.default"),
        options=_counted,
        work=reduced_work,
        saved=saves_nothing,
    )
)

_register(
    "aten.amax.default", "aten.amin.default", "aten.prod.dim_int", "aten.logsumexp.default",
    dims=_listed(1), kind=_choosing, saved=_saves_both,
)  # fmt: skip
_register("aten.any.dim", "aten.all.dim", "aten.any.dims", "aten.all.dims", dims=_listed(1), kind=_choosing)
_register("aten.argmax.default", "aten.argmin.default", dims=_listed(1), kind=_choosing)
_register("aten.var.dim", "aten.var.correction", "aten.std.dim", "aten.std.correction", dims=_listed(1), kind=_choosing)
_register("aten.var_mean.correction", "aten.std_mean.correction", dims=_listed(1), kind=_choosing)
_register(
    "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", dims=_listed(2), kind=_choosing, saved=_saves_both
)
_register(
    "aten.max.default", "aten.min.default", "aten.any.default", "aten.all.default", "aten.prod.default",
    "aten.var.default", "aten.std.default", dims=_every, kind=_choosing,
)  # fmt: skip
register(
    OpRule(
        ops=("aten.max.dim", "aten.min.dim", "aten.median.dim"),
        options=_choosing(_one(1)),
        work=reduced_work,
        saved=_saves_indices,
    )
)
register(
    OpRule(
        ops=("aten.cumprod.default", "aten.logcumsumexp.default"),
        options=_scanning,
        work=pointwise_work,
        saved=_saves_both,
    )
)
register(OpRule(ops=("aten.cumsum.default",), options=_scanning, work=pointwise_work, saved=saves_nothing))
register(OpRule(ops=("aten.cummax.default", "aten.cummin.default"), options=_scanning, work=pointwise_work))
register(OpRule(ops=("aten.topk.default",), options=_sorting(2), work=pointwise_work, saved=_saves_indices))
register(OpRule(ops=("aten.sort.default",), options=_sorting(1), work=pointwise_work, saved=_saves_indices))
register(OpRule(ops=("aten.argsort.default",), options=_sorting(1), work=pointwise_work))
