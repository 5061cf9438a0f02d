"""Writing through a view: a new value for part of a tensor -> the whole tensor with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import UnsupportedModel
from .builder import Builder
from .graph import Ref
from .rewrites import positive, slice_bounds


def _is_complex(b: Builder, ref: Ref) -> bool:
    """Whether autograd has no derivative of slice_scatter and select_scatter: PyTorch 2.13 has none of complex ones."""
    return b.type_of(ref).dtype.startswith("complex")


def _joined(b: Builder, base: Ref, new: Ref, dim: int, start: int, end: int) -> Ref:
    """The base with `new` in place of [start, end) of a dim, put together from parts."""
    whole = b.type_of(base)

    def kept(first: int, last: int) -> Ref:
        shape = (*whole.shape[:dim], last - first, *whole.shape[dim + 1 :])
        return b.op("aten.slice.Tensor", (base, dim, first, last), replace(whole, shape=shape))

    size = whole.shape[dim]
    parts = [*([kept(0, start)] if start else ()), new, *([kept(end, size)] if end < size else ())]
    return new if len(parts) == 1 else b.op("aten.cat.default", (tuple(parts), dim), whole)


def unview_of(
    b: Builder,
    target: torch._ops.OpOverload,
    base: Ref,
    new: Ref,
    arguments: Mapping[str, Any],
    *,
    index: int,
    where: str,
) -> Ref:
    """The base with `new` in the place of the view that `target` took of it; `index`: which of its results that is.

    Raises:
        UnsupportedModel: there is no such operation; `where` is the user's line.
    """
    whole = b.type_of(base)
    rank, name = len(whole.shape), target._opname
    defaults: dict[str, Any] = {a.name: arguments.get(a.name, a.default_value) for a in target._schema.arguments}
    if name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as"):
        return b.reshape(new, whole.shape)
    if name in ("transpose", "t", "mT", "numpy_T", "swapaxes", "swapdims"):
        args = defaults if name == "transpose" else {"dim0": rank - 2, "dim1": rank - 1}
        return b.op("aten.transpose.int", (new, positive(args["dim0"], rank), positive(args["dim1"], rank)), whole)
    if name == "permute":
        order = [positive(dim, rank) for dim in defaults["dims"]]
        return b.op("aten.permute.default", (new, tuple(order.index(dim) for dim in range(rank))), whole)
    if name in ("select", "unbind"):
        dim = positive(defaults["dim"], rank)
        at = index if name == "unbind" else positive(defaults["index"], whole.shape[dim])
        if _is_complex(b, base):
            part = (*whole.shape[:dim], 1, *whole.shape[dim + 1 :])
            return _joined(b, base, b.reshape(new, part), dim, at, at + 1)
        return b.op("aten.select_scatter.default", (base, new, dim, at), whole)
    if name == "slice":
        dim = positive(defaults["dim"], rank)
        start, end = slice_bounds(defaults["start"], defaults["end"], whole.shape[dim])
        if _is_complex(b, base) and defaults["step"] == 1:
            return _joined(b, base, new, dim, start, end)
        if not _is_complex(b, base):
            return b.op("aten.slice_scatter.default", (base, new, dim, start, end, defaults["step"]), whole)
    raise UnsupportedModel(f"an in-place operation writes through {target}", where=where, fix="write it out of place")
