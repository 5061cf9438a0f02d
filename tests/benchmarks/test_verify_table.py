"""The rows of the table of policies."""

import sys
from itertools import combinations, product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import verify_table


@pytest.mark.parametrize("sizes", [(4, 3, 2), (6, 5, 3), (2, 2, 2, 2)])
def test_every_two_options_meet(sizes):
    found = verify_table.covering(sizes)
    for (i, first), (j, second) in combinations(enumerate(sizes), 2):
        met = {(choice[i], choice[j]) for choice in found}
        assert met == set(product(range(first), range(second)))
    assert len(found) == len(set(found)) < len(list(product(*map(range, sizes))))


def test_policies_are_pinned_on_eight_ranks():
    rows = list(verify_table.policies())
    assert all(mesh["pp"] * mesh["dp"] * mesh["tp"] == 8 for mesh, _ in rows)
    assert {pins["zero"] for _, pins in rows} == {0, 1, 2, 3}
    assert {pins["activation_checkpoint"] for _, pins in rows} == {"none", "selective", "full"}
    assert all((mesh["pp"] == 1) == (pins["schedule"] == "none") for mesh, pins in rows)
