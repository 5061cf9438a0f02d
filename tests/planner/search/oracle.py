"""Exhaustive search over every decision, without cost tables or integer programs: each plan is lowered and priced.

What may be chosen is written down here a second time: meshes, microbatches, cuts, schedules, ZeRO stages,
recomputation, shares of the batch, and on every axis an option for every operation and a pair for every tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product

from autopar.cost_models.hardware import Cluster
from autopar.planner.capture.graph import Kind, ModelGraph, Ref
from autopar.planner.errors import CannotLower
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.evaluate import Evaluator
from autopar.planner.search.pins import Pins
from autopar.planner.search.prices import Prices
from autopar.planner.search.rank_speeds import RankSpeeds
from autopar.planner.search.space import Space
from autopar.planner.sharding.mesh import MICROBATCH, Axis, Mesh
from autopar.planner.sharding.placement import PARTIAL, REPLICATED, SUMMED_GRADIENT, can_split, normal, split
from autopar.planner.sharding.redistribute import COLLECTIVES, conversion, has_conversion
from autopar.planner.sharding.rules import options_of

UNSPLIT = ("none", "grad")


@dataclass(frozen=True)
class Price:
    seconds: float
    rank_memory: tuple[int, ...]  # by pipeline rank
    what: str
    policies: tuple[str, ...] = ()  # of the blocks
    zeros: tuple[int, ...] = ()  # likewise

    @property
    def memory_bytes(self) -> int:
        return max(self.rank_memory)

    def fits(self, mesh_hbm_bytes: Callable[[int], tuple[int, ...]]) -> bool:
        """Whether each pipeline rank has room; their number says which ranks of the cluster they are."""
        rooms = mesh_hbm_bytes(len(self.rank_memory))
        return all(size <= room for size, room in zip(self.rank_memory, rooms, strict=True))


@dataclass(frozen=True)
class Machine:
    """A cluster, with how much slower than the fastest device each of its ranks is, and what each has of memory.

    `cluster` is that of the fastest device: what prices are taken from.
    """

    cluster: Cluster
    slowdown: tuple[float, ...]
    hbm_bytes: tuple[int, ...]

    def of_stages(self, ranks: int, pick: Callable[[Iterable[float]], float], values: tuple) -> tuple:
        """Of each pipeline rank, the outermost axis: the worst of its ranks."""
        each = len(values) // ranks
        return tuple(pick(values[first : first + each]) for first in range(0, len(values), each))

    def of_dp_ranks(self, mesh: Mesh) -> tuple[RankSpeeds, ...]:
        """The ranks of each dp coordinate, if these differ."""
        found = []
        for d in range(mesh.dp):
            mine = [rank for rank in range(mesh.world_size) if mesh.coordinate(rank, "dp") == d]
            slow = self.of_stages(mesh.pp, max, tuple(self.slowdown[rank] for rank in mine))
            rooms = self.of_stages(mesh.pp, min, tuple(self.hbm_bytes[rank] for rank in mine))
            found.append(RankSpeeds(slowdown=slow, hbm_bytes=rooms))
        return tuple(found) if len({*found}) > 1 else ()

    def slowdowns(self, ranks: int) -> tuple[float, ...]:
        found = self.of_stages(ranks, max, self.slowdown)
        return found if any(factor != 1 for factor in found) else ()

    def rooms(self, ranks: int) -> tuple[int, ...]:
        return self.of_stages(ranks, min, self.hbm_bytes)


def every_plan(graph: ModelGraph, gpus: int, machine: Machine, stack, pins: Pins) -> Iterator[Price]:
    """The price of every plan there is; whether it fits is for the caller to say."""
    batch = find_batch_split(Space(graph))
    for pp, dp, cp, tp in product(divisors(gpus), repeat=4):
        sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        if pp * dp * cp * tp != gpus or pp > len(graph.units) - 1 or graph.batch_size % dp:
            continue
        if any(sizes[name] != size for name, size in pins.mesh.items()):
            continue
        if cp > 1 and "cp" not in pins.mesh and not splits_context(graph, cp, batch.placements):
            continue
        for microbatches in divisors(graph.batch_size // dp):
            if microbatches > 1 and not batch.allows_microbatches:
                continue
            if pins.microbatch_size not in (None, graph.batch_size // dp // microbatches):
                continue
            is_free = not {"dp", "cp"} & {*pins.mesh} and pins.microbatch_size is None
            if is_free and any(graph.batch_size % (dp * microbatches * k) == 0 for k in divisors(cp)[1:]):
                continue
            mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp, microbatches=microbatches)
            yield from plans_on(graph, mesh, machine, stack, batch.placements, pins)


def divisors(number: int) -> list[int]:
    return [k for k in range(1, number + 1) if number % k == 0]


def plans_on(graph, mesh, machine: Machine, stack, batch_labels, pins) -> Iterator[Price]:
    cluster = machine.cluster
    units = len(graph.units)
    # Each block by itself, whatever stage it is on.
    are_blocks = [graph.templates[unit.template].is_module for unit in graph.units]
    allowed = ("none", "selective", "full") if pins.activation_checkpoint is None else (pins.activation_checkpoint,)
    policies = list(product(*(allowed if each else ("none",) for each in are_blocks)))
    for placements in every_placement(graph, mesh, batch_labels):
        evaluators = {
            (replicas, ()): Evaluator(
                graph=graph,
                master=graph,
                placements=placements,
                prices=Prices(mesh=replace(mesh, replicas=replicas), cluster=cluster, stack=stack),
                optimizer="adamw",
                precision="fp32",
                slowdown=machine.slowdowns(mesh.pp),
            )
            for _, replicas in shardings(mesh, cluster)
        }
        try:
            _ = evaluators[1, ()].program
        except CannotLower:
            continue
        for schedule, per_rank in pipelines(mesh):
            if pins.schedule not in (None, schedule):
                continue
            for ends in combinations(range(2, units), mesh.pp * per_rank - 1):
                bounds = (0, *ends, units)
                stages = tuple(zip(bounds, bounds[1:], strict=False))
                for zero, replicas in shardings(mesh, cluster):
                    if pins.zero not in (None, zero):
                        continue
                    mixes = list(product(*((2, 3) if each else (3,) for each in are_blocks)))
                    stages_of = mixes if zero == 3 and pins.zero is None else [(zero,) * units]
                    for checkpoint, by_unit in product(policies, stages_of):
                        blocks = tuple(p for p, each in zip(checkpoint, are_blocks, strict=True) if each)
                        for shares in all_shares(graph, placements, mesh, machine, schedule, per_rank, zero):
                            if (replicas, shares) not in evaluators:
                                evaluators[replicas, shares] = replace(
                                    evaluators[replicas, ()], dp_ranks=machine.of_dp_ranks(mesh), share_ratio=shares
                                )
                            try:
                                cost = evaluators[replicas, shares].evaluate(
                                    stages, schedule=schedule, zero=of_all(by_unit), activation_checkpoint=checkpoint
                                )
                            except CannotLower:
                                continue
                            policy = f"{schedule} zero={by_unit}/{replicas} {checkpoint} {shares}"
                            what = f"{mesh} {stages} {policy} {placements}"
                            memory = tuple(each["total"] for each in cost.rank_memory)
                            zeros = tuple(z for z, each in zip(by_unit, are_blocks, strict=True) if each)
                            yield Price(cost.step_seconds, memory, what, blocks, zeros)


def of_all(by_unit: tuple[int, ...]) -> int | tuple[int, ...]:
    return by_unit[0] if by_unit[0] < 3 else by_unit


def all_shares(
    graph, placements, mesh: Mesh, machine: Machine, schedule: str, per_rank: int, zero: int
) -> Iterator[tuple[int, ...]]:
    """Numbers of microbatches of the dp ranks, where these differ and no microbatch is of concern to two of them; else
    all dp ranks go in step, ()."""
    is_alike = all(
        labels.get("dp") == labels.get(MICROBATCH)
        for template, placement in zip(graph.templates, placements, strict=True)
        for labels in placement.values()
        if template.name != "Prelude"
    )
    is_free = mesh.microbatches > 1 and is_alike and zero < 3 and (zero < 2 or per_rank == 1)
    if not is_free or not machine.of_dp_ranks(mesh):
        yield ()
        return
    total = mesh.dp * mesh.microbatches
    for shares in product(range(1, total), repeat=mesh.dp):
        legal = (replace(mesh, microbatches=count) for count in shares)
        if sum(shares) == total and all((schedule, per_rank) in pipelines(each) for each in legal):
            yield shares


def shardings(mesh: Mesh, cluster) -> list[tuple[int, int]]:
    """ZeRO stages with the number of groups that hold all shards: one, or one in each node that dp spans."""
    if mesh.dp * mesh.cp == 1:
        return [(0, 1)]
    node, stride = cluster.gpus_per_node, mesh.stride("dp")

    def shares_nodes(size):
        firsts = range(0, mesh.world_size, size * stride)
        return all(first // node == (first + size * stride - 1) // node for first in firsts)

    in_node = [size for size in divisors(mesh.dp) if shares_nodes(size)][-1:]
    groups = {1, *(mesh.dp // size for size in in_node if size * mesh.cp > 1)}
    return [(0, 1), (1, 1), *((zero, count) for zero in (2, 3) for count in sorted(groups))]


def pipelines(mesh: Mesh) -> Iterator[tuple[str, int]]:
    """Schedules with their numbers of stages per rank."""
    if mesh.pp == 1:
        yield "none", 1
        return
    if mesh.microbatches == 1:
        yield "sequential", 1
        return
    yield "gpipe", 1
    if mesh.microbatches >= mesh.pp:
        yield "1f1b", 1
        yield "zero-bubble-v", 2
    if mesh.microbatches % mesh.pp == 0:
        yield from (("interleaved", 2), ("interleaved", 3), ("interleaved", 4))
        yield from (("zero-bubble", 1), ("zero-bubble", 2))


def every_placement(graph: ModelGraph, mesh: Mesh, batch_labels) -> Iterator[tuple[dict, ...]]:
    """Labels for every node of every template, those of all axes together."""
    axes = [axis for axis in mesh.axes if not axis.is_time]
    per_axis = [list(on_axis(graph, axis, batch_labels)) for axis in axes]
    if mesh.microbatches > 1:
        given = [{(t, name): labels[MICROBATCH] for t, p in enumerate(batch_labels) for name, labels in p.items()}]
        axes, per_axis = [*axes, Axis(MICROBATCH, mesh.microbatches)], [*per_axis, given]
    for chosen in product(*per_axis):
        found: tuple[dict, ...] = tuple({} for _ in graph.templates)
        for axis, labels in zip(axes, chosen, strict=True):
            for (t, name), label in labels.items():
                found[t].setdefault(name, {})[axis.name] = label
        if all(divides(graph, found, t, node, mesh) for t, tm in enumerate(graph.templates) for node in tm.nodes):
            yield found


def divides(graph, placements, t, node, mesh) -> bool:
    """Whether an operation that splits one factor over several axes has enough of it."""
    if node.kind is not Kind.OP:
        return True
    labels = placements[t].get(node.name, {})
    for option in options(graph, t, node):
        takers = [axis for axis in mesh.axes if labels.get(axis.name) == option.label]
        together = 1
        for axis in takers:
            together *= axis.size
        if takers and ((option.extent and option.extent % together) or (option.one_axis and len(takers) > 1)):
            return False
    return True


def options(graph, t, node):
    return options_of(node, [graph.templates[t].type_of(ref) for ref in node.operands])


def splits_context(graph: ModelGraph, size: int, batch_labels) -> bool:
    """Whether something that reads a matrix can be split over cp: with the parameters whole, or all of it."""
    for t, template in enumerate(graph.templates[1:], start=1):
        for node in template.of_kind(Kind.OP):
            sources = [template.by_name[ref.node] for ref in node.operands]
            held = [i for i, source in enumerate(sources) if source.kind is Kind.PARAMETER]
            if not any(len(sources[i].output.shape) >= 2 for i in held):
                continue
            of_batch = batch_labels[t].get(node.name, {}).get(MICROBATCH) if batch_labels else None
            for option in options(graph, t, node):
                is_split = option.label not in (*UNSPLIT, of_batch) and not option.label.startswith("partial")
                everything = [str(pair).startswith("S") for pair in (*option.operands, *option.outputs)]
                if is_split and option.extent % size == 0 and (all(everything) or not any(everything[i] for i in held)):
                    return True
    return False


def on_axis(graph: ModelGraph, axis: Axis, batch_labels) -> Iterator[dict[tuple[int, str], str]]:
    """Every legal labelling on one axis, depth first over the nodes in order; all conversions exist."""
    nodes = [(t, node) for t, template in enumerate(graph.templates) for node in template.nodes]
    loss_template = graph.units[graph.loss.unit].template
    loss_ref = graph.templates[loss_template].outputs[graph.loss.output]
    pairs: dict[tuple[int, Ref], object] = {}
    labels: dict[tuple[int, str], str] = {}

    def choices(t, node):
        if node.kind is not Kind.OP:
            return [(str(pair), (pair,), ()) for pair in leaf_pairs(graph, t, node, axis)]
        types = [graph.templates[t].type_of(ref) for ref in node.operands]
        label_of_batch = batch_labels[t].get(node.name, {}).get(MICROBATCH, "none") if batch_labels else None
        found = []
        for option in options(graph, t, node):
            is_partial = option.label.startswith("partial")
            on_dp = (*UNSPLIT, label_of_batch)
            if t and axis.name == "dp" and label_of_batch is not None and not is_partial and option.label not in on_dp:
                continue
            if axis.name in ("cp", "tp") and label_of_batch not in (None, *UNSPLIT) and option.label == label_of_batch:
                continue
            if option.extent % axis.size:
                continue
            makes = tuple(normal(p, v.requires_grad) for p, v in zip(option.outputs, node.outputs, strict=True))
            wants = tuple(normal(p, v.requires_grad) for p, v in zip(option.operands, types, strict=True))
            values = zip((*types, *node.outputs), (*wants, *makes), strict=True)
            if all(can_split(v, {axis.name: p}, (axis,)) for v, p in values):
                found.append((option.label, makes, wants))
        return shared_context(t, node, found) if t and axis.name == "cp" else found

    def shared_context(t, node, found):
        """On cp parameters are whole unless all is split, and what reads a matrix splits something if it can."""
        nodes = graph.templates[t].by_name
        held = [i for i, ref in enumerate(node.operands) if nodes[ref.node].kind is Kind.PARAMETER]

        def is_split(pair):
            return str(pair).startswith("S")

        legal = [
            (label, makes, wants)
            for label, makes, wants in found
            if not any(is_split(wants[i]) for i in held) or all(map(is_split, (*makes, *wants)))
        ]
        shared = [c for c in legal if c[0] not in UNSPLIT and not c[0].startswith("partial")]
        reads_matrix = any(len(nodes[node.operands[i].node].output.shape) >= 2 for i in held)
        return shared if reads_matrix and shared else legal

    def visit(index: int):
        if index == len(nodes):
            if edges_exist() and any(splits(key, label) for key, label in labels.items()):
                yield dict(labels)
            return
        t, node = nodes[index]
        for label, makes, wants in choices(t, node):
            template = graph.templates[t]
            if not all(
                may_become(pairs[t, ref], want, template.by_name[ref.node], axis)
                for ref, want in zip(node.operands, wants, strict=True)
            ):
                continue
            if t == loss_template and node.name == loss_ref.node and makes[loss_ref.index] not in (PARTIAL, REPLICATED):
                continue
            for i, pair in enumerate(makes):
                pairs[t, Ref(node.name, i)] = pair
            labels[t, node.name] = label
            yield from visit(index + 1)

    def splits(key, label):
        t, name = key
        is_operation = graph.templates[t].by_name[name].kind is Kind.OP
        return t > 0 and is_operation and label not in UNSPLIT and not label.startswith("partial")

    def edges_exist():
        for unit in graph.units:
            inputs = graph.templates[unit.template].of_kind(Kind.INPUT)
            for node, value in zip(inputs, unit.inputs, strict=False):
                source = graph.units[value.unit].template
                made = pairs[source, graph.templates[source].outputs[value.output]]
                if not has_conversion(made, pairs[unit.template, Ref(node.name)]):
                    return False
        return True

    yield from visit(0)


def may_become(made, wanted, node, axis) -> bool:
    if not has_conversion(made, wanted):
        return False
    if node.kind is Kind.PARAMETER and made != wanted:
        step = conversion(made, wanted)
        return step.forward not in COLLECTIVES and step.backward not in COLLECTIVES
    return True


def leaf_pairs(graph: ModelGraph, t: int, node, axis: Axis):
    value = node.output
    if node.kind is Kind.INPUT and t == 0:
        return [split(0) if axis.name == "dp" else REPLICATED]
    splits = [split(dim) for dim in range(len(value.shape)) if value.shape[dim] % axis.size == 0]
    if node.kind is Kind.INPUT:
        return [*splits, REPLICATED, *([SUMMED_GRADIENT, PARTIAL] if value.requires_grad else [PARTIAL])]
    if axis.name in ("dp", "cp"):
        return [SUMMED_GRADIENT]
    if len(value.shape) == 2 and splits:
        return splits
    return [REPLICATED, SUMMED_GRADIENT, *splits]
