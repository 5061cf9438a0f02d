"""Embedding lookups: split over indices or features in einsum form, over rows of the table in a body."""

from __future__ import annotations

from collections.abc import Mapping

from ....cost_models.work import Pass, Work
from ...capture.graph import ITEM_BYTES, Node
from ...errors import CannotLower
from ..placement import PARTIAL, SUMMED_GRADIENT, split
from .factors import factor_options
from .registry import AxisRef, Call, Labels, LocalTypes, Operand, OpRule, Option, Saved, register, same_call

# Source: CUDA C++ Programming Guide, device memory accesses: DRAM and L2 are read in sectors of 32 bytes.
_SECTOR_BYTES = 32


def _flag(node: Node, position: int, name: str, default: object) -> object:
    return node.args[position] if len(node.args) > position else dict(node.kwargs).get(name, default)


def _options(node: Node, operands: LocalTypes) -> tuple[Option, ...]:
    table, ids = operands
    if _flag(node, 4, "sparse", False):
        return ()
    # Scaling by frequency counts the indices of the whole batch.
    counts_ids = bool(_flag(node, 3, "scale_grad_by_freq", False))
    dims = ["" if counts_ids else f"d{i}" for i in range(len(ids.shape))]
    found = factor_options([["", "f"], dims], [[*dims, "f"]], operands, node.outputs)
    if counts_ids or table.shape[0] < 2:
        return found
    rows = Option(
        label="v", operands=(split(0), SUMMED_GRADIENT), outputs=(PARTIAL,), extent=table.shape[0], one_axis=True
    )
    return (*found, rows)


def _localise(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    axes = [axis for axis, label in labels.items() if label == "v"]
    if not axes:
        return same_call(node, labels, outputs, sizes)
    if len(axes) > 1:
        raise CannotLower(f"{node.name}: the rows of a table are split over one axis only, not over {', '.join(axes)}")
    padding = _flag(node, 2, "padding_idx", -1)
    kwargs = () if padding == -1 else (("padding_idx", padding),)
    return Call(target="embedding_rows", args=(Operand(1), Operand(0), AxisRef(axes[0])), kwargs=kwargs)


def _work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """Gathers rows; backward clears a gradient of the table and adds every output row to it.

    A row at random takes whole sectors of memory, however short it is.
    """
    table, ids = operands
    row_bytes = outputs[0].num_bytes // max(1, ids.numel)
    rows = ids.numel * max(row_bytes, _SECTOR_BYTES)
    forward = Pass(bytes=ids.num_bytes + rows + outputs[0].num_bytes, kernels=1)
    if not table.requires_grad:
        return Work(forward=forward, dtype=outputs[0].dtype)
    traffic = table.num_bytes + ids.num_bytes + rows + outputs[0].num_bytes
    backward = Pass(flops=outputs[0].numel, bytes=traffic, kernels=2)
    return Work(forward=forward, backward=backward, dtype=outputs[0].dtype)


def _saved(node: Node) -> Saved:
    return Saved(operands=(1,))


def _rows_saved(node: Node, operands: LocalTypes, call: Call) -> Saved:
    """The positions in this rank's rows, and which of them are its own."""
    ids = operands[1]
    return Saved(extra_bytes=ids.num_bytes + ITEM_BYTES["bool"] * ids.numel)


register(
    OpRule(
        ops=("aten.embedding.default",),
        options=_options,
        work=_work,
        saved=_saved,
        saved_by={"embedding_rows": _rows_saved},
        localise=_localise,
    )
)
