"""Where the ranks of axes lie, and of what ZeRO takes together."""

import pytest
from autopar.planner.sharding.mesh import Mesh, splits_states

EVERY = Mesh(pp=2, dp=4, ep=2, cp=2, tp=3, replicas=2)


def test_ranks_of_dp_and_cp_hold_the_same_parameters():
    for name in ("pp", "ep", "tp"):
        for rank in range(EVERY.world_size):
            joined = EVERY.joined("dp_cp", rank)
            assert {EVERY.coordinate(other, name) for other in joined} == {EVERY.coordinate(rank, name)}
    joined = EVERY.joined("dp_cp", 5)
    assert len(joined) == EVERY.state_ranks == 8
    assert [EVERY.state_rank(rank) for rank in joined] == list(range(8))


def test_shards_are_on_neighbours_and_replicas_across():
    assert EVERY.shards == 4
    for rank in range(EVERY.world_size):
        near, far = EVERY.joined("dp_shard", rank), EVERY.joined("dp_replicate", rank)
        assert {EVERY.state_rank(other) // 4 for other in near} == {EVERY.state_rank(rank) // 4}
        assert {EVERY.state_rank(other) % 4 for other in far} == {EVERY.state_rank(rank) % 4}
        assert (len(near), len(far)) == (4, 2)
        assert rank in set(near) & set(far)


@pytest.mark.parametrize(
    ("mesh", "name"), [(Mesh(dp=2), "dp"), (Mesh(cp=2), "cp"), (Mesh(dp=2, cp=2), "dp_cp"), (Mesh(tp=2), "dp")]
)
def test_what_zero_splits_over_is_named_by_its_axes(mesh, name):
    assert mesh.state_axis == name
    if mesh.state_ranks > 1:
        assert set(mesh.joined(name, 0)) == set(range(mesh.world_size))


def test_groups_of_shards_hold_all_of_cp():
    assert [size for size in range(1, 9) if splits_states(size, dp=4, cp=2)] == [2, 4, 8]
    assert [size for size in range(1, 9) if splits_states(size, dp=4, cp=1)] == [1, 2, 4]
