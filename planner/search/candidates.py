"""The outer choices: meshes and microbatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from math import isqrt

from ..capture.graph import Kind, ModelGraph
from ..sharding.mesh import AXES, Axis, Mesh, splits_states
from .batch import BatchSplit, splits_evenly
from .batch_shares import pinned_shares
from .pins import Pins, written_shares
from .policies import mixed_dtypes, no_pipeline, num_cuttable, pipelines_for
from .space import Rules, Space, operation_options, reads_matrix
from .step_uses import splits


def possible_meshes(space: Space, batch: BatchSplit, gpus: int, pins: Pins) -> tuple[tuple[Mesh, ...], tuple[str, ...]]:
    """Every mesh of `gpus` ranks with every number of microbatches that the pins and the batch allow, pp first; and
    why others are not among them.

    Unless it is pinned, ep is there only where parameters are made of experts, and cp only where dp cannot take over
    any of it with as many microbatches: as many ranks of dp share the same work without gathering keys and values.
    """
    graph = space.graph
    reasons: dict[str, None] = {}
    found: list[Mesh] = []
    may_split_context = cache(partial(splits_context, space, batch))
    pinned = {**({"dp": len(pins.batch_shares)} if pins.batch_shares else {}), **pins.mesh}
    for sizes in _axis_sizes(gpus, pinned, space.experts.counts):
        is_offered = "cp" not in pins.mesh and sizes["cp"] > 1
        if is_offered and not may_split_context(sizes["cp"]):
            continue
        reason = _refusal(space, sizes, pins)
        if reason:
            reasons[reason] = None
            continue
        counts, reason = _microbatch_counts(space, batch, sizes, pins)
        if reason:
            reasons[reason] = None
        meshes = (Mesh(**sizes, microbatches=count, shares=()) for count in counts)
        found.extend(mesh for mesh in meshes if not (is_offered and _dp_takes_over(graph, mesh, pins)))
    return tuple(found), tuple(reasons)


def splits_context(space: Space, batch: BatchSplit, size: int) -> bool:
    """Whether an operation that reads a matrix of parameters can split anything over cp."""
    axis, rules = Axis("cp", size), Rules(batch=batch.placements)
    for t, template in enumerate(space.graph.templates):
        for node in template.of_kind(Kind.OP) if t != space.prelude else ():
            if reads_matrix(template, node):
                options = operation_options(space, t, node, axis, rules)
                if any(splits(option.label) and option.extent % size == 0 for option in options):
                    return True
    return False


def _dp_takes_over(graph: ModelGraph, mesh: Mesh, pins: Pins) -> bool:
    """Whether dp could be larger by some factor of cp, for microbatches of as many samples fewer."""
    if "dp" in pins.mesh or pins.microbatch_size is not None:
        return bool(pins.batch_shares)
    parts = mesh.dp * mesh.microbatches
    return any(graph.batch_size % (parts * factor) == 0 for factor in _divisors(mesh.cp) if factor > 1)


def _axis_sizes(gpus: int, pinned: Mapping[str, int], experts: frozenset[int]) -> Iterator[dict[str, int]]:
    """Sizes of all axes whose product is `gpus`, pp first."""
    of_axis = {name: [pinned[name]] if name in pinned else None for name in AXES}
    if "ep" not in pinned:
        of_axis["ep"] = sorted({1, *(size for count in experts for size in _divisors(count))})

    def following(names: Sequence[str], left: int) -> Iterator[dict[str, int]]:
        name, *others = names
        for size in [left] if not others else _divisors(left):
            if (wanted := of_axis[name]) is not None and size not in wanted:
                continue
            if not others:
                yield {name: size}
            else:
                yield from ({name: size, **rest} for rest in following(others, left // size))

    yield from following(AXES, gpus)


def _refusal(space: Space, sizes: Mapping[str, int], pins: Pins) -> str:
    graph, pp, dp, ep, cp = space.graph, sizes["pp"], sizes["dp"], sizes["ep"], sizes["cp"]
    counts = sorted(space.experts.counts)
    if ep > 1 and not counts:
        return f"ep={ep} splits experts, and no product of {graph.name} has any"
    if ep > 1 and all(count % ep for count in counts):
        return f"ep={ep} does not divide {' or '.join(map(str, counts))} experts"
    if graph.batch_size % dp:
        return f"dp={dp} does not divide batch {graph.batch_size}"
    pieces = pp * (pins.stages_per_rank or 1)
    if pieces > num_cuttable(graph):
        each = f" with {pins.stages_per_rank} stages per rank" if pieces > pp else ""
        return f"pp={pp}{each} needs {pieces} pieces, the model has {num_cuttable(graph)}"
    if (pins.zero not in (None, 0, 1) or pins.zero_shard_size is not None) and (mixed := mixed_dtypes(graph)):
        stage = f"zero={pins.zero}" if pins.zero is not None else f"zero-shard-size={pins.zero_shard_size}"
        return f"{stage} is FSDP2's, which shards parameters of one dtype together, and {mixed}"
    if pins.zero and dp * cp == 1:
        return f"zero={pins.zero} splits over dp and cp, and dp=1, cp=1"
    if pins.zero_shard_size is not None and dp * cp == 1:
        return f"zero-shard-size={pins.zero_shard_size} splits over dp and cp, and dp=1, cp=1"
    if pins.zero_shard_size is not None and not splits_states(pins.zero_shard_size, dp, cp):
        beside = f" with cp={cp}" if cp > 1 else ""
        return f"zero-shard-size={pins.zero_shard_size} does not divide dp={dp}{beside}"
    if pins.schedule == "none" and pp > 1:
        return f"schedule none has one stage, and pp={pp}"
    if pins.schedule not in (None, "none") and pp == 1:
        return f"schedule {pins.schedule} needs pp > 1"
    if pp == 1 and (pins.stages_per_rank or 1) > 1:
        return f"{pins.stages_per_rank} stages per rank need pp > 1"
    return ""


def _microbatch_counts(space: Space, batch: BatchSplit, sizes: Mapping[str, int], pins: Pins) -> tuple[list[int], str]:
    """Numbers of microbatches, and the reason if a pinned one cannot be."""
    share = space.graph.batch_size // sizes["dp"]
    wanted = _divisors(share)
    if pins.microbatch_size is not None:
        if share % pins.microbatch_size:
            return [], f"microbatch size {pins.microbatch_size} does not divide the {share} samples of a dp rank"
        wanted = [share // pins.microbatch_size]
    counts: list[int] = []
    reason = ""
    for count in wanted:
        mesh = Mesh(**sizes, microbatches=count, shares=())
        shares = pinned_shares(pins.batch_shares, sizes["dp"] * count) if pins.batch_shares else None
        if pins.is_uneven and batch.obstacle:
            reason = f"batch-shares={written_shares(pins.batch_shares or ())} need microbatches: {batch.obstacle}"
        elif pins.batch_shares and shares is None:
            reason = (
                f"batch-shares={written_shares(pins.batch_shares)} do not deal out {sizes['dp'] * count} microbatches "
                f"of {share // count} samples"
            )
        elif count > 1 and not batch.allows_microbatches:
            reason = f"{count} microbatches: {batch.obstacle}"
        elif count > 1 and not _splits_evenly(space, batch, sizes["dp"] * count):
            reason = f"{count} microbatches do not divide every tensor"
        elif not pipelines_for(mesh, pins, num_cuttable(space.graph)):
            reason = no_pipeline(mesh, pins)
        else:
            counts.append(count)
    return counts, "" if counts else reason


def _splits_evenly(space: Space, batch: BatchSplit, parts: int) -> bool:
    """Whether the batch can be cut so; dp and microbatches cut the same dims, so only their product matters."""
    known = space.even_parts
    if parts not in known:
        known[parts] = splits_evenly(space, batch.placements or (), Mesh(dp=parts))
    return known[parts]


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
