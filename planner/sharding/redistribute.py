"""Every change of a placement pair on one mesh axis, as a fixed pair of operations (forward, backward).

This table is what makes the emitted module exact: a conversion that is not in it does not exist.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from ..capture.graph import TensorType
from ..errors import CannotLower
from .mesh import Axis
from .placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, Layout, Pair, can_split, local_type


@dataclass(frozen=True, slots=True)
class Conversion:
    """`function` names the runtime function, the others the operation: "" for none, a local one in brackets."""

    function: str
    forward: str
    backward: str


TAKES_PART = "[slice]"
_TABLE: dict[tuple[str, str], Conversion] = {
    ("P/R", "R"): Conversion("all_reduce", "all_reduce", ""),
    ("P/R", "S"): Conversion("reduce_scatter", "reduce_scatter", "all_gather"),
    ("P/R", "R/P"): Conversion("all_reduce_both", "all_reduce", "all_reduce"),
    ("R", "R/P"): Conversion("reduce_gradient", "", "all_reduce"),
    ("R", "S"): Conversion("take_shard", TAKES_PART, "all_gather"),
    ("R", "P/R"): Conversion("keep_on_first", "[mask]", ""),
    ("S", "R"): Conversion("all_gather_replicated", "all_gather", TAKES_PART),
    ("S", "R/P"): Conversion("all_gather", "all_gather", "reduce_scatter"),
    ("S", "P/R"): Conversion("zero_pad", "[pad]", TAKES_PART),
    ("S", "S"): Conversion("all_to_all", "all_to_all", "all_to_all"),
    ("R/P", "S"): Conversion("slice_shard", TAKES_PART, "[pad]"),
    ("R/P", "R"): Conversion("keep_gradient_on_first", "", "[mask]"),
}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def conversion(source: Pair, target: Pair) -> Conversion | None:
    """The operations that turn `source` into `target` on one axis; None where nothing is to be done.

    Raises:
        CannotLower: there is no such conversion (R/P -> P/R, or anything the table lacks).
    """
    if source == target:
        return None
    if not has_conversion(source, target):
        raise CannotLower(f"there is no conversion from {source} to {target}")
    return _TABLE[source.kind, target.kind]


def has_conversion(source: Pair, target: Pair) -> bool:
    return source == target or (source.kind, target.kind) in _TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveUse:
    """One collective that a rank takes part in.

    `num_bytes` is the payload of the whole group: the full tensor for all_reduce, the gathered tensor for all_gather,
    the unreduced tensor for reduce_scatter, the local tensor for all_to_all, what is sent for send.
    `phase`: "forward", "backward" (both every microbatch) or "step" (once a step).
    """

    op: str
    axis: str
    num_bytes: int
    phase: str
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One conversion on one axis, with the local type before it and the layout after it."""

    axis: str
    source: Pair
    target: Pair
    conversion: Conversion
    before: TensorType
    after: TensorType

    def collectives(self, axis: Axis) -> tuple[CollectiveUse, ...]:
        uses = []
        for op, phase in ((self.conversion.forward, "forward"), (self.conversion.backward, "backward")):
            if op not in COLLECTIVES or (phase == "backward" and not self.before.requires_grad):
                continue
            num_bytes = max(self.before.num_bytes, self.after.num_bytes)
            uses.append(CollectiveUse(op=op, axis=axis.name, num_bytes=num_bytes, phase=phase, dtype=self.before.dtype))
        return tuple(uses)


def changes(value: TensorType, source: Layout, target: Layout, axes: Sequence[Axis]) -> tuple[Change, ...]:
    """The cheapest legal order of one-axis conversions from `source` to `target`, with local types between.

    Several axes on one dim: splits are undone minor axis first and made major axis first. Ties keep mesh order. Where
    no order is legal (a major axis is to split a dim that a minor one splits already), some axes go by way of R.

    Raises:
        CannotLower: some axis has no such conversion, or no order is legal.
    """
    moving = [axis for axis in axes if source.get(axis.name, REPLICATED) != target.get(axis.name, REPLICATED)]
    if not moving:
        return ()
    for axis in moving:
        conversion(source.get(axis.name, REPLICATED), target.get(axis.name, REPLICATED))
    best: tuple[int, tuple[Change, ...]] | None = None
    for order in permutations(moving):
        steps = tuple(_walk(value, dict(source), target, order, axes))
        if len(steps) < len(moving):
            continue
        if len(moving) == 1:
            return steps
        cost = sum(use.num_bytes for step, axis in zip(steps, order, strict=True) for use in step.collectives(axis))
        if best is None or cost < best[0]:
            best = cost, steps
    if best is not None:
        return best[1]
    return _by_way_of_replicated(value, dict(source), target, axes)


def _by_way_of_replicated(
    value: TensorType, source: dict[str, Pair], target: Layout, axes: Sequence[Axis]
) -> tuple[Change, ...]:
    """The fewest conversions, breadth first, where every axis but a time axis may be R on the way."""
    paths: list[tuple[dict[str, Pair], tuple[Change, ...]]] = [(source, ())]
    seen = [_key(source, axes)]
    goal = _key(target, axes)
    for state, steps in paths:
        if _key(state, axes) == goal:
            return steps
        for axis in axes:
            wanted = target.get(axis.name, REPLICATED)
            for pair in (wanted,) if axis.is_time else (wanted, REPLICATED):
                current = state.get(axis.name, REPLICATED)
                if pair == current or not has_conversion(current, pair):
                    continue
                following = dict(state)
                step = tuple(_walk(value, following, {axis.name: pair}, (axis,), axes))
                if step and _key(following, axes) not in seen:
                    seen.append(_key(following, axes))
                    paths.append((following, steps + step))
    raise CannotLower(f"no legal order of conversions from {_words(source)} to {_words(target)}")


def _words(layout: Layout) -> str:
    return ", ".join(f"{axis}: {pair}" for axis, pair in layout.items()) or str(REPLICATED)


def _key(layout: Layout, axes: Sequence[Axis]) -> tuple[Pair, ...]:
    return tuple(layout.get(axis.name, REPLICATED) for axis in axes)


def _walk(
    value: TensorType, state: dict[str, Pair], target: Layout, order: Sequence[Axis], axes: Sequence[Axis]
) -> Iterator[Change]:
    for axis in order:
        source, wanted = state.get(axis.name, REPLICATED), target.get(axis.name, REPLICATED)
        if _is_hidden(state, axis, source, axes) or _is_hidden(state, axis, wanted, axes):
            return
        before = local_type(value, state, axes)
        state[axis.name] = wanted
        if not can_split(value, state, axes):
            return
        after = local_type(value, state, axes)
        found = conversion(source, wanted)
        assert found is not None
        yield Change(axis=axis.name, source=source, target=wanted, conversion=found, before=before, after=after)


def _is_hidden(state: Layout, axis: Axis, pair: Pair, axes: Sequence[Axis]) -> bool:
    """Whether another axis has cut the runs that `axis` splits, so that its parts are no longer contiguous."""
    if not pair.is_split:
        return False
    position = axes.index(axis)
    for index, other in enumerate(axes):
        theirs = state.get(other.name, REPLICATED)
        if index == position or not theirs.is_split or theirs.dim != pair.dim:
            continue
        if theirs.groups == pair.groups:
            if index > position:
                return True
        elif theirs.groups > pair.groups and theirs.groups % (pair.groups * axis.size):
            return True
    return False


__all__ = [
    "COLLECTIVES", "PARTIAL", "REPLICATED", "SUMMED_GRADIENT", "TAKES_PART", "Change", "CollectiveUse", "Conversion",
    "changes",
    "conversion", "has_conversion",
]  # fmt: skip
