"""A placement problem -> a smaller one with the same optimum: sources and unary chains are merged into their consumer.

A value that only one operand reads ties two vertices together. If the producer reads nothing (a parameter), or the
consumer reads nothing else (a view, an activation function), the two become one vertex whose choices are the cheapest
pairs of choices for each combination of what the pair shows to the rest: what the producer wants, what the consumer
makes. Ties are priced here, once, so that the answer is the same whether or not vertices were merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .assignment import Choice, Group, Problem, State

TIE_CHOICE_SECONDS = 1e-11  # per position of a choice
TIE_CONVERSION_SECONDS = 1e-10  # per conversion
_MOST_CHOICES = 80  # of a merged vertex

_States = tuple[State, ...]
Picks = tuple[tuple[int, int], ...]  # (vertex, position of its choice) in the whole problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """The smaller problem, and what each of its choices stands for. `ties_seconds`: the most that ties can cost."""

    problem: Problem
    picks: tuple[tuple[Picks, ...], ...]
    ties_seconds: float


@dataclass(slots=True)
class _Vertex:
    choices: list[tuple[Choice, Picks]]
    operands: dict[int, int] = field(default_factory=dict)  # position -> groups that feed it, of those still read


def reduce(problem: Problem, alive: Sequence[Sequence[int]], seconds_per_byte: float, *, merge: bool) -> Reduced:
    """Keep the `alive` choices, put the price of memory and of ties into their cost, and merge where it is exact."""
    read = {group.producer for group in problem.groups}
    vertices: dict[int, _Vertex] = {}
    for n, positions in enumerate(alive):
        made = []
        for k in positions:
            old = problem.choices[n][k]
            cost = old.cost_seconds + seconds_per_byte * old.memory_bytes + TIE_CHOICE_SECONDS * k
            outputs = tuple(state if (n, i) in read else None for i, state in enumerate(old.outputs))
            made.append(
                (
                    Choice(
                        label=k,
                        outputs=outputs,
                        operands=old.operands,
                        cost_seconds=cost,
                        memory_bytes=old.memory_bytes,
                    ),
                    ((n, k),),
                )
            )
        vertices[n] = _Vertex(made)
    for group in problem.groups:
        for n, j in group.consumers:
            vertices[n].operands[j] = vertices[n].operands.get(j, 0) + 1
    groups = list(problem.groups)
    if merge:
        groups = _merge_all(vertices, groups)
    order = sorted(vertices)
    index = {n: i for i, n in enumerate(order)}
    ties = sum(TIE_CHOICE_SECONDS * len(choices) for choices in problem.choices)
    ties += sum(TIE_CONVERSION_SECONDS * len(group.consumers) for group in problem.groups)
    return Reduced(
        problem=Problem(
            names=tuple(problem.names[n] for n in order),
            choices=tuple(tuple(choice for choice, _ in vertices[n].choices) for n in order),
            groups=tuple(
                Group(
                    producer=(index[group.producer[0]], group.producer[1]),
                    consumers=tuple((index[n], j) for n, j in group.consumers),
                    weight=group.weight,
                    prices=group.prices,
                )
                for group in groups
            ),
        ),
        picks=tuple(tuple(picks for _, picks in vertices[n].choices) for n in order),
        ties_seconds=ties,
    )


def _merge_all(vertices: dict[int, _Vertex], groups: list[Group]) -> list[Group]:
    """Merge until nothing can be merged; the groups that are left."""
    made: dict[int, int] = {}
    for group in groups:
        made[group.producer[0]] = made.get(group.producer[0], 0) + 1
    waiting = list(groups)
    kept: list[Group] = []
    while waiting:
        group = waiting.pop(0)
        u, v = group.producer[0], group.consumers[0][0]
        is_edge = len(group.consumers) == 1 and u != v and made[u] == 1
        if not is_edge or not _merge(vertices, group):
            kept.append(group)
            continue
        # What fed the producer feeds the consumer now; groups seen before may have become edges.
        waiting = [_moved(other, u, v) for other in (*waiting, *kept)]
        kept = []
        del vertices[u]
    return kept


def _moved(group: Group, old: int, new: int) -> Group:
    if all(n != old for n, _ in group.consumers):
        return group
    consumers = tuple((new if n == old else n, j) for n, j in group.consumers)
    return Group(producer=group.producer, consumers=consumers, weight=group.weight, prices=group.prices)


def _merge(vertices: dict[int, _Vertex], group: Group) -> bool:
    """Merge the producer of an edge into its consumer, in place; False where that is not possible."""
    (u, output), ((v, operand),) = group.producer, group.consumers
    producer, consumer = vertices[u], vertices[v]
    # An input of a repeated block is fed by the block before and by what comes before the first: that is no edge.
    is_source = not producer.operands and consumer.operands[operand] == 1
    is_unary = consumer.operands == {operand: 1}
    if not is_source and not is_unary:
        return False
    best: dict[tuple[_States, _States], tuple[float, Picks, Picks]] = {}
    for key, cost, ours, theirs in _pairs(producer, consumer, group, output, operand, keep_consumer=is_source):
        if key not in best or cost < best[key][0]:
            best[key] = cost, ours, theirs
            if len(best) > _MOST_CHOICES:
                return False
    if not best:
        return False  # the solver will say that nothing fits together
    consumer.choices = [
        (Choice(label=None, outputs=outputs, operands=operands, cost_seconds=cost), ours + theirs)
        for (operands, outputs), (cost, ours, theirs) in best.items()
    ]
    kept = {position: feeds for position, feeds in consumer.operands.items() if position != operand}
    consumer.operands = kept if is_source else dict(producer.operands)
    return True


def _pairs(
    producer: _Vertex, consumer: _Vertex, group: Group, output: int, operand: int, *, keep_consumer: bool
) -> Iterator[tuple[tuple[_States, _States], float, Picks, Picks]]:
    """((operands, outputs), cost, picks of both) of every pair of choices that go together."""
    for theirs, their_picks in consumer.choices:
        wanted = theirs.operands[operand]
        for ours, our_picks in producer.choices:
            made: State = ours.outputs[output]
            price = group.prices.get((made, wanted))
            if price is None:
                continue
            cost = ours.cost_seconds + theirs.cost_seconds + group.weight * price
            if made != wanted:
                cost += TIE_CONVERSION_SECONDS
            operands = ours.operands
            if keep_consumer:
                operands = tuple(None if j == operand else state for j, state in enumerate(theirs.operands))
            yield (operands, theirs.outputs), cost, our_picks, their_picks
