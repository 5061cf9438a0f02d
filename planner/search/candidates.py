"""The outer choices: meshes, microbatches, and a lower bound on what each can reach.

The bound of a candidate takes every operation at its whole size, spread evenly over all ranks (kernels get no more
efficient when they get smaller), or the host time of its launches, which no split reduces; plus fill and drain of the
pipeline and the optimizer on the smallest share of the parameters. No placement, cut or policy is faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import gcd, inf, isqrt

from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.errors import AutoparError
from ...cost_models.hardware import Cluster
from ...cost_models.optimizer import optimizer_seconds
from ...cost_models.stacks import Stack
from ..capture.graph import Kind, ModelGraph
from ..checkpointing import MIXED, POLICIES, Checkpointing, by_unit, name_of, parse_checkpoints
from ..schedules import get_schedule, schedule_names
from ..sharding.mesh import AXES, Axis, Mesh, splits_states
from ..sharding.shares import why_even_under
from ..zero import FREED, ZERO_STAGES, Zero, check_zero, highest, parse_zero, stages_by_unit
from .batch import BatchSplit, splits_evenly
from .batch_shares import pinned_shares
from .host_seconds import holds_dtensors
from .prices import local_work
from .space import Rules, Space, operation_options, reads_matrix
from .step_uses import splits

Pipeline = tuple[str, int]  # schedule, stages per rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the user fixed; None is free. `mesh` holds the axes that are fixed."""

    mesh: Mapping[str, int]
    microbatch_size: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    zero: int | str | None = None  # of all blocks, or "h.{0..3}=2,*=3"
    activation_checkpoint: str | None = None  # of all blocks, or "h.{0..2}=full,h.3=selective"
    zero_shard_size: int | None = None  # ranks (of dp, all of cp) that ZeRO-2 and ZeRO-3 split over
    batch_shares: tuple[int, ...] | None = None  # of each dp rank, in any unit

    def check(self) -> None:
        """Refuse values that no plan can have.

        Raises:
            AutoparError: the value and the valid ones.
        """
        for name, size in self.mesh.items():
            if name not in AXES:
                raise AutoparError(f"there is no mesh axis {name!r}", fix=f"axes are {', '.join(AXES)}")
            if size < 1:
                raise AutoparError(f"{name}={size} is no size", fix="sizes start at 1")
        if isinstance(self.zero, str):
            parse_zero(self.zero, where=f"--zero {self.zero}")
        elif self.zero is not None:
            check_zero(self.zero)
        checkpoint = self.activation_checkpoint or "none"
        if checkpoint not in POLICIES:
            parse_checkpoints(checkpoint, where=f"--activation-checkpoint {checkpoint}")
            checkpoint = MIXED
        if self.schedule is not None:
            schedule = get_schedule(self.schedule)
            zero = FREED if isinstance(self.zero, str) else self.zero or 0
            for name, each, policy in (("zero", zero, "none"), ("activation-checkpoint", 0, checkpoint)):
                if reason := schedule.refuse_policies(each, policy):
                    value = self.zero if name == "zero" else self.activation_checkpoint
                    raise AutoparError(
                        f"schedule {self.schedule} and {name} {value} clash: {reason}", fix="leave one of the two free"
                    )
        if self.stages_per_rank is not None and self.stages_per_rank < 1:
            raise AutoparError(f"{self.stages_per_rank} stages per rank are none", fix="give a positive number")
        if self.zero_shard_size is not None and self.zero in (0, 1):
            raise AutoparError(
                f"zero={self.zero} and zero-shard-size={self.zero_shard_size} contradict each other",
                fix="only ZeRO-2 and ZeRO-3 split over a part of the ranks: pin --zero 2 or 3, or neither",
            )

        self._check_shares()

    def _check_shares(self) -> None:
        if self.batch_shares is None:
            return
        dp, shares = self.mesh.get("dp", len(self.batch_shares)), written_shares(self.batch_shares)
        if min(self.batch_shares, default=0) < 1 or len(self.batch_shares) < 2:
            fix = "give each dp rank a whole number of at least 1, as in 3,1"
            raise AutoparError(f"batch-shares={shares} are no shares of two or more dp ranks", fix=fix)
        if dp != len(self.batch_shares):
            raise AutoparError(
                f"batch-shares={shares} names {len(self.batch_shares)} dp ranks, and dp={dp}",
                fix=f"give {dp} shares, or leave one of the two out",
            )
        zero = FREED if isinstance(self.zero, str) else self.zero or 0
        if self.is_uneven and (reason := why_even_under(zero, self.stages_per_rank or 1)):
            pins = f"zero={self.zero}" + (f" with stages-per-rank={self.stages_per_rank}" if zero < FREED else "")
            raise AutoparError(f"batch-shares={shares} and {pins} clash: {reason}", fix="let one of them free")

    @property
    def is_uneven(self) -> bool:
        """Whether dp ranks are to take different shares of the batch."""
        return len({*(self.batch_shares or ())}) > 1

    def described(self) -> dict[str, str]:
        found = {}
        if self.mesh:
            found["mesh"] = ",".join(f"{name}={self.mesh[name]}" for name in AXES if name in self.mesh)
        names = ("microbatch_size", "schedule", "stages_per_rank", "zero", "activation_checkpoint", "zero_shard_size")
        for name in names:
            value = getattr(self, name)
            if value is not None:
                found[name.replace("_", "-")] = str(value)
        if self.batch_shares is not None:
            found["batch-shares"] = written_shares(self.batch_shares)
        return found


def written_shares(shares: Sequence[int]) -> str:
    """As an option has them."""
    return ",".join(map(str, shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """The step on one device with nothing split: what bounds are made of."""

    device_seconds: float
    host_seconds: float  # one microbatch: launches of every unit, forward and backward
    trained_bytes: int
    tensors_by_unit: tuple[int, ...]  # parameters that a unit trains, those of tied ones where they are first used


def whole_model(space: Space, master: ModelGraph, cluster: Cluster, stack: Stack) -> WholeModel:
    graph = space.graph
    gpu = cluster.gpu.at_best_rates()
    device = host = 0.0
    for t, template in enumerate(graph.templates):
        if t == space.prelude:
            continue
        for node in template.of_kind(Kind.OP):
            work = local_work(node, [template.type_of(ref) for ref in node.operands], node.outputs)
            ahead = device_seconds(work.forward, gpu, dtype=work.dtype, stack=stack)
            back = device_seconds(work.backward, gpu, dtype=work.dtype, stack=stack, is_backward=True)
            device += space.counts[t] * (ahead + back)
            launches = host_seconds(work.forward, gpu, stack=stack) + host_seconds(work.backward, gpu, stack=stack)
            host += space.counts[t] * launches
    trained = {fqn: info.type.num_bytes for fqn, info in master.tensors.items() if info.type.requires_grad}
    return WholeModel(
        device_seconds=device,
        host_seconds=host,
        trained_bytes=sum(trained.values()),
        tensors_by_unit=_first_uses(graph, trained),
    )


def _first_uses(graph: ModelGraph, trained: Mapping[str, int]) -> tuple[int, ...]:
    seen: set[str] = set()
    counts = []
    for unit in graph.units[1:]:
        held = {
            fqn
            for name, fqn in unit.tensors
            if fqn in trained and graph.templates[unit.template].by_name[name].output.requires_grad
        }
        counts.append(len(held - seen))
        seen |= held
    return tuple(counts)


def least_largest(counts: Sequence[int], parts: int) -> int:
    """The smallest that the largest sum can be when a sequence is cut into at most `parts` runs."""
    low, high = max((*counts, 0)), sum(counts)
    while low < high:
        middle = (low + high) // 2
        runs, room = 1, middle
        for count in counts:
            if count > room:
                runs, room = runs + 1, middle
            room -= count
        low, high = (low, middle) if runs <= parts else (middle + 1, high)
    return low


def bound_seconds(
    whole: WholeModel, mesh: Mesh, cluster: Cluster, optimizer: str, *, shards: bool, fills: bool
) -> float:
    """No plan on this mesh is faster. `shards`: ZeRO may split the optimizer's work too. `fills`: as `always_fills`."""
    actions = 2 * mesh.pp * cluster.gpu.pipeline_action_seconds if mesh.pp > 1 else 0.0
    through = max(whole.device_seconds / (mesh.stage_size * mesh.microbatches), whole.host_seconds + actions)
    share = whole.trained_bytes // (mesh.pp * mesh.ep * mesh.tp * (mesh.state_ranks if shards else 1))
    fullest = least_largest(whole.tensors_by_unit, mesh.pp)
    update = optimizer_seconds(
        share, cluster.gpu, optimizer=optimizer, num_tensors=fullest, sharded=holds_dtensors(mesh, 0)
    )
    started = cluster.gpu.pipeline_step_seconds if mesh.pp > 1 else 0.0
    return started + through * pipeline_factor(mesh, fills=fills) + update


def pipeline_factor(mesh: Mesh, *, fills: bool) -> float:
    """What a step takes at least, in microbatches that go through the whole model, forward and backward.

    Each rank works on every microbatch, and the ranks' shares add up to the model. Where the pipeline fills and drains
    in whole shares, one microbatch goes through all of them while nothing else is done for it.
    """
    if fills:
        return 1 + (mesh.microbatches - 1) / mesh.pp
    return mesh.microbatches / mesh.pp


def always_fills(pipelines: Sequence[Pipeline]) -> bool:
    """Whether each of these fills and drains through all of a rank's work: one stage per rank, backward whole."""
    return all(stages == 1 and not get_schedule(name).splits_backward for name, stages in pipelines)


def num_cuttable(graph: ModelGraph) -> int:
    """Units that a pipeline can cut apart: all but the prelude."""
    return len(graph.units) - 1


def possible_meshes(space: Space, batch: BatchSplit, gpus: int, pins: Pins) -> tuple[tuple[Mesh, ...], tuple[str, ...]]:
    """Every mesh of `gpus` ranks with every number of microbatches that the pins and the batch allow, pp first; and
    why others are not among them.

    Unless it is pinned, ep is there only where parameters are made of experts, and cp only where dp cannot take over
    any of it: as many ranks of dp share the same work without gathering keys and values.
    """
    graph = space.graph
    reasons: dict[str, None] = {}
    found: list[Mesh] = []
    may_split_context = cache(partial(splits_context, space, batch))
    pinned = {**({"dp": len(pins.batch_shares)} if pins.batch_shares else {}), **pins.mesh}
    for sizes in _axis_sizes(gpus, pinned, space.experts.counts):
        is_offered = "cp" not in pins.mesh and sizes["cp"] > 1
        if is_offered and (_dp_takes_over(graph, sizes) or not may_split_context(sizes["cp"])):
            continue
        reason = _refusal(space, sizes, pins)
        if reason:
            reasons[reason] = None
            continue
        counts, reason = _microbatch_counts(space, batch, sizes, pins)
        if reason:
            reasons[reason] = None
        found.extend(Mesh(**sizes, microbatches=count, shares=()) for count in counts)
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


def _dp_takes_over(graph: ModelGraph, sizes: Mapping[str, int]) -> bool:
    """Whether dp could be larger by some factor of cp."""
    return any(graph.batch_size % (sizes["dp"] * factor) == 0 for factor in _divisors(sizes["cp"]) if factor > 1)


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
            reason = _no_pipeline(mesh, pins)
        else:
            counts.append(count)
    return counts, "" if counts else reason


def _splits_evenly(space: Space, batch: BatchSplit, parts: int) -> bool:
    """Whether the batch can be cut so; dp and microbatches cut the same dims, so only their product matters."""
    known = space.even_parts
    if parts not in known:
        known[parts] = splits_evenly(space, batch.placements or (), Mesh(dp=parts))
    return known[parts]


def pipelines_for(
    mesh: Mesh, pins: Pins, pieces: int, zero: Zero = 0, checkpoint: Checkpointing = "none"
) -> list[Pipeline]:
    """The pipelines that can run a model of so many pieces: fewer stages first, then fewer activations where known."""
    found: list[Pipeline] = []
    pinned = pinned_shares(pins.batch_shares, mesh.dp * mesh.microbatches) if pins.batch_shares else None
    counts = {*(pinned or (mesh.microbatches,))}
    for name in schedule_names() if pins.schedule is None else (pins.schedule,):
        schedule = get_schedule(name)
        if pins.schedule is None and mesh.microbatches < schedule.searched_from:
            continue
        if schedule.refuse_policies(highest(zero), name_of(checkpoint)):
            continue
        for stages in schedule.stages_per_rank if pins.stages_per_rank is None else (pins.stages_per_rank,):
            if stages * mesh.pp > pieces or any(schedule.refuse(mesh.pp, stages, count) for count in counts):
                continue
            if not (pins.is_uneven and why_even_under(highest(zero), stages)):
                found.append((name, stages))

    def kept(pipeline: Pipeline) -> tuple[int, float, str]:
        name, stages = pipeline
        closed_form = get_schedule(name).in_flight if stages == 1 else None
        return stages, inf if closed_form is None else closed_form(0, mesh.pp, mesh.microbatches), name

    return sorted(found, key=kept)


def _no_pipeline(mesh: Mesh, pins: Pins) -> str:
    if pins.schedule is None:
        each = f" of {pins.stages_per_rank} stages per rank" if pins.stages_per_rank else ""
        return f"no schedule{each} can run {mesh.microbatches} microbatches on pp={mesh.pp}"
    schedule = get_schedule(pins.schedule)
    tried = schedule.stages_per_rank if pins.stages_per_rank is None else (pins.stages_per_rank,)
    reasons = [reason for stages in tried if (reason := schedule.refuse(mesh.pp, stages, mesh.microbatches))]
    why = reasons[0] if reasons else f"pp={mesh.pp} with {tried[0]} stages per rank needs more pieces than there are"
    return f"schedule {pins.schedule} cannot run on pp={mesh.pp}: {why}"


def checkpoints_for(graph: ModelGraph, pins: Pins) -> tuple[Checkpointing, ...]:
    """What is pinned, or each policy for all blocks.

    Raises:
        AutoparError: a pin names a block that there is not.
    """
    pinned = pins.activation_checkpoint
    if pinned is None:
        return POLICIES
    if pinned in POLICIES:
        return (pinned,)
    where = f"--activation-checkpoint {pinned}"
    return (by_unit(graph, parse_checkpoints(pinned, where=where), where=where, default="none"),)


def shardings_for(graph: ModelGraph, mesh: Mesh, pins: Pins, cluster: Cluster) -> tuple[tuple[Zero, int], ...]:
    """(ZeRO stage, replicas): stages 2 and 3 split over all of dp (and cp), or over its ranks of one node.

    Raises:
        AutoparError: a pin names a block that there is not.
    """
    found: list[tuple[Zero, int]] = []
    for zero in (pinned_zero(graph, pins),) if isinstance(pins.zero, str) else zeros_for(mesh, pins):
        if highest(zero) < 2:
            sizes = [mesh.dp] if pins.zero_shard_size is None else []
        elif pins.zero is None and mixed_dtypes(graph):
            sizes = []
        elif pins.zero_shard_size is not None:
            sizes = [pins.zero_shard_size // mesh.cp]
        else:
            near = _near_ranks(mesh, cluster.gpus_per_node)
            sizes = [mesh.dp, near] if near * mesh.cp > 1 and near < mesh.dp else [mesh.dp]
        found.extend((zero, mesh.dp // size) for size in sizes)
    return tuple(found)


def _near_ranks(mesh: Mesh, gpus_per_node: int) -> int:
    """The most consecutive ranks of dp that share a node wherever they begin; all of dp where none do."""
    stride = mesh.stride("dp")
    if mesh.world_size <= gpus_per_node or gpus_per_node % stride:
        return mesh.dp
    return gcd(mesh.dp, gpus_per_node // stride)


def mixed_dtypes(graph: ModelGraph) -> str:
    """What keeps FSDP2 from sharding the model: which block trains parameters of several dtypes; "" if none does."""
    outside: set[str] = set()
    for template in graph.templates:
        parameters = template.of_kind(Kind.PARAMETER)
        dtypes = {node.output.dtype for node in parameters if node.output.requires_grad}
        if template.is_module and len(dtypes) > 1:
            return f"{template.pattern} trains {' and '.join(sorted(dtypes))}"
        outside |= set() if template.is_module else dtypes
    return f"{' and '.join(sorted(outside))} are trained outside of blocks" if len(outside) > 1 else ""


def pinned_zero(graph: ModelGraph, pins: Pins) -> Zero:
    """The ZeRO stages of the blocks that are pinned.

    Raises:
        AutoparError: the pin names a block that there is not.
    """
    where = f"--zero {pins.zero}"
    stages = parse_zero(str(pins.zero), where=where)
    return stages if isinstance(stages, int) else stages_by_unit(graph, stages, where=where)


def zeros_for(mesh: Mesh, pins: Pins) -> tuple[int, ...]:
    """ZeRO stages; 3 where blocks have pinned ones of 2 and 3."""
    if pins.zero is not None:
        return (FREED if isinstance(pins.zero, str) else pins.zero,)
    every = ZERO_STAGES if mesh.state_ranks > 1 else (0,)
    return tuple(zero for zero in every if not (pins.is_uneven and why_even_under(zero, 1)))


def _divisors(number: int) -> list[int]:
    small = [k for k in range(1, isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
