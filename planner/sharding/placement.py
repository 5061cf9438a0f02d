"""Placement pairs: how a value and its gradient lie on one mesh axis, and the local shape that follows.

| pair | forward | gradient | written |
|---|---|---|---|
| split | Shard(dim) | Shard(dim) | S(1), S(0;3) |
| REPLICATED | Replicate | Replicate | R |
| SUMMED_GRADIENT | Replicate | Partial | R/P |
| PARTIAL | Partial | Replicate | P/R |

`S(dim; groups)` first cuts the dim into `groups` equal runs and then splits every run over the axis: the split of the
heads in a fused [q, k, v] dim is S(0;3), the split of T in a flattened (B, T) dim is S(0;B). `groups` is counted on the
global tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from ..capture.graph import TensorType
from ..errors import CannotLower
from .mesh import Axis


class Pair(NamedTuple):
    """A named tuple, since a search looks pairs up millions of times."""

    kind: str  # "S" | "R" | "R/P" | "P/R"
    dim: int = -1
    groups: int = 1

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.groups == 1 else f"S({self.dim};{self.groups})"

    @property
    def is_split(self) -> bool:
        return self.kind == "S"


REPLICATED = Pair("R")
SUMMED_GRADIENT = Pair("R/P")
PARTIAL = Pair("P/R")


def split(dim: int, groups: int = 1) -> Pair:
    return Pair("S", dim, groups)


_PATTERN = re.compile(r"S\((\d+)(?:;(\d+))?\)")


def parse_pair(text: str) -> Pair:
    """Read "R", "R/P", "P/R", "S(1)" or "S(0;3)".

    Raises:
        ValueError: any other text.
    """
    if text in ("R", "R/P", "P/R"):
        return Pair(text)
    if match := _PATTERN.fullmatch(text):
        return split(int(match[1]), int(match[2] or 1))
    raise ValueError(f"{text!r} is no placement pair: R, R/P, P/R, S(dim) or S(dim;groups)")


# How a value lies on every axis; an axis that is not named is REPLICATED.
Layout = Mapping[str, Pair]


def normal(pair: Pair, requires_grad: bool) -> Pair:
    """Values without a gradient serve as R and R/P alike; write them R."""
    return REPLICATED if pair == SUMMED_GRADIENT and not requires_grad else pair


def local_type(value: TensorType, layout: Layout, axes: Sequence[Axis]) -> TensorType:
    """The part of `value` that one rank holds in one microbatch."""
    shape = list(value.shape)
    for axis in axes:
        pair = layout.get(axis.name, REPLICATED)
        if pair.is_split:
            if shape[pair.dim] % axis.size:
                raise CannotLower(f"{axis.name}={axis.size} does not divide dim {pair.dim} of {value.shape}")
            shape[pair.dim] //= axis.size
    return TensorType(shape=tuple(shape), dtype=value.dtype, requires_grad=value.requires_grad)


def local_groups(layout: Layout, axis: str, axes: Sequence[Axis]) -> int:
    """`groups` of the split on `axis`, counted on the local tensor: other axes may have split the runs among ranks."""
    pair = layout[axis]
    groups = pair.groups
    for other in axes:
        theirs = layout.get(other.name, REPLICATED)
        if other.name != axis and theirs.is_split and theirs.dim == pair.dim and theirs.groups < pair.groups:
            groups //= other.size
    return max(groups, 1)


def can_split(value: TensorType, layout: Layout, axes: Sequence[Axis]) -> bool:
    """Whether every split of `layout` divides evenly, several axes on one dim included."""
    by_dim: dict[int, list[tuple[int, int]]] = {}
    for axis in axes:
        pair = layout.get(axis.name, REPLICATED)
        if pair.is_split:
            by_dim.setdefault(pair.dim, []).append((pair.groups, axis.size))
    for dim, splits in by_dim.items():
        if not value.shape[dim]:
            return False  # no element to hold apart
        # Fewer groups lie outside: the parts of an outer split must hold whole runs of the next finer one.
        parts = 1
        for groups in sorted({groups for groups, _ in splits}):
            if groups % parts:
                return False
            parts = groups * prod(size for other, size in splits if other == groups)
        if value.shape[dim] % parts:
            return False
    return True
