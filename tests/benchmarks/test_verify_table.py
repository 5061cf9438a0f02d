"""The rows of the table of policies."""

import sys
from itertools import combinations, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import verify_table


@pytest.mark.parametrize("sizes", [(4, 3, 2), (6, 5, 3), (2, 2, 2, 2)])
def test_every_two_options_meet(sizes):
    found = verify_table.covering(list(product(*map(range, sizes))))
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        met = {(choice[i], choice[j]) for choice in found}
        assert met == set(product(range(first), range(second)))
    assert len(found) == len(set(found)) < len(list(product(*map(range, sizes))))


def test_policies_are_pinned_on_eight_ranks():
    rows = list(verify_table.policies(16))
    assert all(mesh["pp"] * mesh["dp"] * mesh["tp"] == 8 for mesh, _ in rows)
    assert {pins["zero"] for _, pins in rows} == {0, 1, 2, 3}
    assert {pins["activation_checkpoint"] for _, pins in rows} == {"none", "selective", "full"}
    assert all((mesh["pp"] == 1) == (pins["schedule"] == "none") for mesh, pins in rows)


def test_what_never_meets_is_left_out():
    every = [choice for choice in product(range(3), range(3)) if choice != (0, 0)]
    assert set(verify_table.covering(every)) == set(every)
    pins = [pins for _, pins in verify_table.policies(16)]
    assert not [
        p for p in pins if p["schedule"] == "zero-bubble" and (p["zero"] == 3 or p["activation_checkpoint"] != "none")
    ]
    assert {p["microbatch_size"] for p in pins if p["schedule"] == "sequential"} <= {4, 8}
