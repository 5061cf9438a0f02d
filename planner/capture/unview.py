"""Writing through a view: a new value for part of a tensor -> the whole tensor with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import UnsupportedModel
from .builder import Builder
from .graph import Ref
from .rewrites import positive, slice_bounds


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
        return b.op("aten.select_scatter.default", (base, new, dim, at), whole)
    if name == "slice":
        dim = positive(defaults["dim"], rank)
        start, end = slice_bounds(defaults["start"], defaults["end"], whole.shape[dim])
        return b.op("aten.slice_scatter.default", (base, new, dim, start, end, defaults["step"]), whole)
    raise UnsupportedModel(f"an in-place operation writes through {target}", where=where, fix="write it out of place")
