"""The stage ILP against its own search and against plain enumeration."""

import random
from dataclasses import replace
from itertools import combinations
from math import inf

import pytest
from autopar.planner.search.assignment import NoAssignment
from autopar.planner.search.cutting import Cutting, objective
from autopar.planner.search.filling import cut_evenly
from autopar.planner.search.stages_ilp import best_cut, cut_by_ilp
from cut_oracle import cut_by_search


def random_cutting(seed: int) -> Cutting:
    rng = random.Random(seed)
    units, stages = rng.randint(3, 8), rng.randint(2, 4)
    held = tuple(float(rng.randint(1, 20)) for _ in range(units))
    return Cutting(
        seconds=tuple(rng.choice([1e-3, 2e-3, rng.random() * 1e-2]) for _ in range(units)),
        held_bytes=held,
        kept_bytes=tuple(float(rng.randint(0, 5)) for _ in range(units)),
        cut_seconds=tuple(rng.random() * 1e-3 for _ in range(units)),
        in_flight=tuple(range(stages, 0, -1)),
        rank_of=tuple(range(stages)),
        microbatches=rng.choice([1, 4, 8]),
        room_bytes=rng.choice([inf, sum(held) / stages * 2.0]) if rng.random() < 0.9 else 1.0,
        **(different_ranks(rng, stages) if seed % 3 == 2 else {}),
        **(run_again(rng, units, stages) if seed % 5 == 3 else {}),
    )


def run_again(rng: random.Random, units: int, stages: int) -> dict[str, tuple[float, ...]]:
    return {
        "halfway": tuple(min(s, stages - s) for s in range(stages)),
        "remade_bytes": tuple(float(rng.randint(5, 9)) for _ in range(units)),
    }


def different_ranks(rng: random.Random, stages: int) -> dict[str, tuple[float, ...]]:
    return {
        "pace": tuple(rng.choice([1.0, 1.3, 2.0]) for _ in range(stages)),
        "short_bytes": tuple(rng.choice([0.0, 4.0]) for _ in range(stages)),
    }


@pytest.mark.parametrize("seed", range(60))
def test_ilp_and_search_equal_enumeration(seed):
    cutting = random_cutting(seed)
    if cutting.room_bytes == inf:
        cutting = Cutting(**{name: getattr(cutting, name) for name in cutting.__slots__} | {"room_bytes": 1e6})
    units = len(cutting.seconds)
    want = min(
        (objective(cutting, ends) for ends in combinations(range(1, units), cutting.num_stages - 1)), default=inf
    )
    if want == inf:
        with pytest.raises(NoAssignment):
            cut_by_ilp(cutting)
        with pytest.raises(NoAssignment):
            cut_by_search(cutting)
        return
    assert objective(cutting, cut_by_ilp(cutting)) == pytest.approx(want, abs=1e-9)
    assert objective(cutting, cut_by_search(cutting)) == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("seed", range(200))
def test_cuts_of_one_price_equal_enumeration(seed):
    cutting = random_cutting(seed)
    room = min(cutting.room_bytes, 1e6)
    cutting = replace(cutting, cut_seconds=(2e-4,) * len(cutting.seconds), room_bytes=room)
    find = cut_evenly if cutting.are_ranks_alike else best_cut
    every = combinations(range(1, len(cutting.seconds)), cutting.num_stages - 1)
    want = min((objective(cutting, ends) for ends in every), default=inf)
    if want == inf:
        with pytest.raises(NoAssignment):
            find(cutting)
        return
    assert objective(cutting, find(cutting)) == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_a_cut_of_equal_units_fills_the_last_stages():
    cutting = Cutting(
        seconds=(1.0,) * 10, held_bytes=(1.0,) * 10, kept_bytes=(1.0,) * 10, cut_seconds=(0.0,) * 10,
        in_flight=(4, 3, 2, 1), rank_of=(0, 1, 2, 3), microbatches=8, room_bytes=100.0,
    )  # fmt: skip
    assert cut_evenly(cutting) == (1, 4, 7)


def test_uneven_stages_balance_a_heavy_head():
    cutting = Cutting(
        seconds=(1.0, 1.0, 1.0, 1.0, 3.0),
        held_bytes=(1.0,) * 5,
        kept_bytes=(0.0,) * 5,
        cut_seconds=(0.0,) * 5,
        in_flight=(2, 1),
        rank_of=(0, 1),
        microbatches=8,
        room_bytes=10.0,
    )
    assert cut_by_ilp(cutting) in {(3,), (4,)}
    assert objective(cutting, cut_by_ilp(cutting)) == 7 * 4.0


def test_a_slow_rank_gets_less():
    cutting = Cutting(
        seconds=(1.0,) * 9, held_bytes=(1.0,) * 9, kept_bytes=(0.0,) * 9, cut_seconds=(0.0,) * 9, in_flight=(2, 1),
        rank_of=(0, 1), microbatches=8, room_bytes=100.0, pace=(2.0, 1.0),
    )  # fmt: skip
    assert cut_evenly(cutting) == (3,)
    assert cut_evenly(replace(cutting, short_bytes=(0.0, 95.0))) == (4,)
