"""The op-level ILP against plain enumeration, on random problems."""

import random
from itertools import product
from math import inf

import pytest
from autopar.planner.search.assignment import Choice, Group, NoAssignment, Problem
from autopar.planner.search.placements_ilp import solve


def random_problem(seed: int) -> Problem:
    """3 to 6 vertices, cycles and shared values included, some conversions missing."""
    rng = random.Random(seed)
    states = "abcd"[: rng.randint(2, 4)]
    count = rng.randint(3, 6)
    edges: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    num_operands = [0] * count
    for vertex in range(1, count):
        for source in rng.sample(range(vertex), min(vertex, rng.randint(1, 2))):
            edges[source].append((vertex, num_operands[vertex]))
            num_operands[vertex] += 1
    # As at the input of a repeated block: fed by what comes before the first one, and by the end of the block.
    back = (0, num_operands[0])
    num_operands[0] += 1
    feeds_input = rng.random() < 0.5
    choices = tuple(
        tuple(
            Choice(
                label=k,
                outputs=(rng.choice(states),),
                operands=tuple(rng.choice(states) for _ in range(num_operands[vertex])),
                cost_seconds=rng.random() * 1e-3,
                memory_bytes=float(rng.randint(0, 100)),
            )
            for k in range(rng.randint(2, 4))
        )
        for vertex in range(count)
    )

    def prices() -> dict[tuple[str, str], float]:
        return {
            (p, r): 0.0 if p == r else rng.random() * 1e-3
            for p in states
            for r in states
            if p == r or rng.random() < 0.8
        }

    groups = [
        Group(producer=(source, 0), consumers=tuple(readers), weight=float(rng.randint(1, 5)), prices=prices())
        for source, readers in enumerate(edges)
        if readers
    ]
    groups.append(Group(producer=(count - 1, 0), consumers=(back,), weight=3.0, prices=prices()))
    if feeds_input:
        entry = tuple(
            Choice(label=k, outputs=(rng.choice(states),), cost_seconds=rng.random() * 1e-3, memory_bytes=10.0)
            for k in range(3)
        )
        choices = (*choices, entry)
        groups.append(Group(producer=(count, 0), consumers=(back,), weight=1.0, prices=prices()))
        count += 1
    return Problem(names=tuple(str(n) for n in range(count)), choices=choices, groups=tuple(groups))


def enumerate_best(problem: Problem, limit: float) -> float:
    """The least cost over all assignments within the limit, counted one conversion at a time."""
    best = inf
    for chosen in product(*(range(len(choices)) for choices in problem.choices)):
        picked = [choices[k] for choices, k in zip(problem.choices, chosen, strict=True)]
        if sum(choice.memory_bytes for choice in picked) > limit:
            continue
        cost = sum(choice.cost_seconds for choice in picked)
        for group in problem.groups:
            source, output = group.producer
            paid = set()
            for vertex, position in group.consumers:
                step = (picked[source].outputs[output], picked[vertex].operands[position])
                if step not in group.prices:
                    cost = inf
                elif step not in paid:
                    paid.add(step)
                    cost += group.weight * group.prices[step]
        best = min(best, cost)
    return best


@pytest.mark.parametrize("with_memory", [False, True])
def test_equals_enumeration(with_memory):
    binding = 0
    for seed in range(100):
        problem = random_problem(seed)
        free = enumerate_best(problem, inf)
        limit = inf
        if with_memory:
            try:
                limit = solve(problem).memory_bytes - 1
            except NoAssignment:
                assert free == inf
                continue
            binding += enumerate_best(problem, limit) > free
        want = enumerate_best(problem, limit)
        try:
            got = solve(problem, memory_limit_bytes=None if limit == inf else limit)
        except NoAssignment:
            assert want == inf
            continue
        assert got.cost_seconds == pytest.approx(want, rel=1e-6, abs=1e-9)
        assert got.bound_seconds <= want + 1e-9
        assert got.memory_bytes <= limit
    assert not with_memory or binding > 40


def test_consumers_share_one_conversion():
    maker = (Choice(label="s", outputs=("s",)),)
    reader = (Choice(label="r", outputs=("r",), operands=("r",)),)
    group = Group(producer=(0, 0), consumers=((1, 0), (2, 0), (3, 0)), weight=2.0, prices={("s", "r"): 1.0})
    problem = Problem(names=("m", "q", "k", "v"), choices=(maker, reader, reader, reader), groups=(group,))
    assert solve(problem).cost_seconds == 2.0


def test_says_who_has_no_choice():
    maker = (Choice(label="s", outputs=("s",)),)
    reader = (Choice(label="r", outputs=("r",), operands=("r",)),)
    group = Group(producer=(0, 0), consumers=((1, 0),), weight=1.0, prices={})
    with pytest.raises(NoAssignment) as error:
        solve(Problem(names=("maker", "reader"), choices=(maker, reader), groups=(group,)))
    assert error.value.vertex == "reader"


def test_prefers_earlier_choices_and_no_conversion():
    maker = (Choice(label="a", outputs=("a",)), Choice(label="b", outputs=("b",)))
    reader = (Choice(label="a", outputs=(), operands=("a",)), Choice(label="b", outputs=(), operands=("b",)))
    prices = {(p, r): 0.0 for p in "ab" for r in "ab"}
    group = Group(producer=(0, 0), consumers=((1, 0),), weight=1.0, prices=prices)
    assert solve(Problem(names=("m", "r"), choices=(maker, reader), groups=(group,))).chosen == (0, 0)
