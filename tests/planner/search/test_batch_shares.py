"""Shares of the batch: the best numbers against all there are."""

import random
from itertools import product

import pytest
from autopar.planner.schedules import get_schedule, possible_counts, schedule_names
from autopar.planner.search.batch_shares import Sharing, pinned_shares


def every_share(total, ranks, least, step):
    """All numbers of microbatches that add up."""
    numbers = range(least, total + 1, step)
    return [counts for counts in product(numbers, repeat=ranks) if sum(counts) == total]


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_best_of_all(seed):
    rng = random.Random(seed)
    ranks, step = rng.choice((2, 3, 4)), rng.choice((1, 1, 2))
    least = step * rng.choice((1, 2))
    total = ranks * (least + step * rng.randrange(4))
    kinds = tuple(rng.randrange(3) for _ in range(ranks))
    first = [rng.random() for _ in range(3)]
    each = [rng.choice((1.0, 1.3, 2.0, 5.0)) for _ in range(3)]
    most = [rng.choice((total, total, least + step)) for _ in range(3)]

    def seconds(kind, count):
        return first[kind] + count * each[kind]

    def fits(kind, count):
        return count <= most[kind]

    sharing = Sharing(total, kinds, seconds, fits, least, step)
    legal = [s for s in every_share(total, ranks, least, step) if all(map(fits, kinds, s))]
    found = sharing.best()
    if not legal:
        assert found is None
        return
    assert found in legal
    best = min(max(map(seconds, kinds, shares)) for shares in legal)
    assert max(map(seconds, kinds, found)) == pytest.approx(best, rel=1e-12)


def test_a_rank_without_room_leaves_none():
    assert Sharing(4, (0, 1), lambda kind, count: count, lambda kind, count: kind == 0).best() is None


def test_proportions():
    assert pinned_shares((3, 1), 8) == (6, 2)
    assert pinned_shares((3, 2), 8) is None


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("per_rank", [1, 2, 3])
def test_numbers_that_a_schedule_runs(name, ranks, per_rank):
    legal = [m for m in range(1, 40) if not get_schedule(name).refuse(ranks, per_rank, m)]
    counts = possible_counts(name, ranks, per_rank)
    if counts is None:
        assert len(legal) < 2
        return
    least, step = counts
    assert legal == list(range(least, 40, step))
