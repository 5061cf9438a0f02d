"""As few blocks run again as memory asks for: against every choice there is, alone and in whole searches."""

import random
from itertools import product

import pytest
from autopar.planner.checkpointing import POLICIES
from autopar.planner.search.pins import Pins
from autopar.planner.search.recompute import Blocks, every_mix, least_seconds
from graphs import chain
from limits import compare


def random_blocks(rng: random.Random) -> Blocks:
    count = rng.randint(1, 4)
    selective = rng.randint(1, 9)
    return Blocks(
        units=tuple(range(count)),
        in_flight=tuple(sorted((rng.randint(1, 3) for _ in range(count)), reverse=True)),
        seconds={"none": 0.0, "selective": rng.randint(1, 5), "full": rng.randint(5, 12)},
        spared_bytes={"none": 0.0, "selective": selective, "full": selective + rng.randint(0, 9)},
        working_bytes={"none": 1, "selective": rng.randint(1, 3), "full": rng.randint(3, 5)},
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_fewest_seconds_are_those_of_every_choice(seed):
    rng = random.Random(seed)
    groups = [random_blocks(rng) for _ in range(rng.randint(1, 3))]
    needed, working = rng.randint(0, 40), rng.randint(1, 5)
    blocks = [(group, n) for group in groups for n in group.in_flight]
    best = None
    for policies in product(POLICIES, repeat=len(blocks)):
        chosen = [(group, n, policy) for (group, n), policy in zip(blocks, policies, strict=True) if policy != "none"]
        if any(group.working_bytes[policy] > working for group, _, policy in chosen):
            continue
        if sum(n * group.spared_bytes[policy] for group, n, policy in chosen) >= needed:
            seconds = sum(group.seconds[policy] for group, _, policy in chosen)
            best = seconds if best is None else min(best, seconds)
    found = least_seconds(groups, needed, working)
    assert (None if found is None else found[0]) == best


def test_mixes_are_counts_of_equal_blocks():
    graph = chain(4, batch=8, width=16)
    mixes = list(every_mix(graph, ((0, 6),)))
    # One first block, three others: 3 * 10 choices, three of them all alike.
    assert len(mixes) == len(set(mixes)) == 27
    assert all(mix[0] == mix[5] == "none" for mix in mixes)


def policies_of(plan):
    return plan.policies


def test_a_mix_is_the_only_best_plan_where_memory_lies_between():
    graph = chain(3, batch=4096, width=256)
    pins = Pins(mesh={"pp": 2}, microbatch_size=1024, schedule="1f1b")
    assert compare(graph, pins, 8, random.Random(0), policies_of) >= 1


# With the schedule free, another schedule is the better way to spare memory under each of these limits.
@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "mixed"), [("gpipe", 1), ("1f1b", 1), (None, 0)])
def test_equals_every_choice_under_many_limits(schedule, mixed):
    graph = chain(4, batch=4096, width=256)
    pins = Pins(mesh={"pp": 2}, microbatch_size=1024, schedule=schedule)
    assert compare(graph, pins, 6, random.Random(1), policies_of) >= mixed
