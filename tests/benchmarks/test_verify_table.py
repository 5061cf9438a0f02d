"""The rows of the table of policies."""

import sys
from itertools import combinations, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import verify_table
from autopar.planner.schedules import schedule_names


@pytest.mark.parametrize("sizes", [(4, 3, 2), (6, 5, 3), (2, 2, 2, 2)])
def test_every_two_options_meet(sizes):
    found = verify_table.covering(list(product(*map(range, sizes))))
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        met = {(choice[i], choice[j]) for choice in found}
        assert met == set(product(range(first), range(second)))
    assert len(found) == len(set(found)) < len(list(product(*map(range, sizes))))


def test_what_never_meets_is_left_out():
    every = [choice for choice in product(range(3), range(3)) if choice != (0, 0)]
    assert set(verify_table.covering(every)) == set(every)


ROWS = list(verify_table.policies(16))
SHARDED = {(0, None), (1, None), (2, None), (3, None), (2, 2), (3, 2)}  # ZeRO stage, ranks that share its states
OPTIONS = (SHARDED, set(schedule_names()), {"none", "selective", "full"})


def test_every_two_policies_meet_in_a_row():
    rows = [
        ((pins["zero"], pins.get("zero_shard_size")), pins["schedule"], pins["activation_checkpoint"])
        for _, pins in ROWS
    ]
    for i, j in combinations(range(3), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(OPTIONS[i], OPTIONS[j]))


def test_policies_are_pinned_on_eight_ranks():
    assert all(mesh["pp"] * mesh["dp"] * mesh["tp"] == 8 for mesh, _ in ROWS)
    assert all((mesh["pp"] == 1) == (pins["schedule"] == "none") for mesh, pins in ROWS)
    assert all(mesh["dp"] > pins["zero_shard_size"] for mesh, pins in ROWS if "zero_shard_size" in pins)
    assert {pins["microbatch_size"] for _, pins in ROWS if pins["schedule"] == "sequential"} <= {4, 8}
