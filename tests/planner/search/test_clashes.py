"""Pins that contradict each other, the batch, the model or the number of GPUs: named, no more and no less."""

import re
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.schedules import schedule_names
from autopar.planner.search.answer import NothingFits, Setting
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.clashes import meshes_under
from autopar.planner.search.pins import Pins, written_shares
from autopar.planner.search.space import Space
from autopar.planner.search.sweep import search
from autopar.planner.sharding.mesh import AXES
from graphs import residual_mlp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GPUS, BATCH = 8, 12
GRAPH = residual_mlp(batch=BATCH, depth=4)  # 5 pieces
VALUES = {
    **{axis: (1, 2, 3, 4, 8) for axis in AXES},
    "zero": (0, 1, 2, 3),
    "zero_shard_size": (1, 2, 4),
    "schedule": schedule_names(),
    "stages_per_rank": (1, 2, 3),
    "microbatch_size": (1, 2, 4, 5, 12),
    "batch_shares": ((1, 1), (3, 1), (2, 1), (1, 1, 2, 2)),
    "activation_checkpoint": ("none", "selective", "full"),
}


def pins_of(chosen: dict) -> Pins:
    mesh = {name: value for name, value in chosen.items() if name in AXES}
    return Pins(mesh=mesh, **{name: value for name, value in chosen.items() if name not in AXES})


@cache
def measures():
    space = Space(GRAPH)
    return space, find_batch_split(space)


def refusal(chosen: dict, gpus: int = GPUS) -> AutoparError | None:
    try:
        pins = pins_of(chosen)
        pins.check()
        meshes_under(*measures(), gpus, pins)
    except AutoparError as error:
        return error
    return None


def names_in(error: AutoparError) -> str:
    """What stands before the reason."""
    return str(error.what).split(" contradict ")[0].split(" clash: ")[0]


def is_named(text: str, name: str, value: object) -> bool:
    shown = written_shares(value) if isinstance(value, tuple) else str(value)
    return re.search(rf"(?<![\w-]){name.replace('_', '-')}[= ]{re.escape(shown)}(?![\w-])", text) is not None


CASES = [
    ({"tp": 3}, ["tp=3"], "8 ranks"),
    ({"dp": 8}, ["dp=8"], "does not divide batch 12"),
    ({"pp": 8}, ["pp=8"], "the model has 5"),
    ({"ep": 2}, ["ep=2"], "experts"),
    ({"microbatch_size": 5}, ["microbatch-size=5"], "does not divide"),
    ({"dp": 4, "tp": 4}, ["dp=4", "tp=4"], "8 ranks"),
    ({"tp": 8, "zero": 3}, ["tp=8", "zero=3"], "dp=1"),
    ({"dp": 1, "zero": 2}, ["dp=1", "zero=2"], "splits over dp"),
    ({"dp": 4, "microbatch_size": 2}, ["dp=4", "microbatch-size=2"], "3 samples"),
    ({"dp": 2, "zero_shard_size": 4}, ["dp=2", "zero-shard-size=4"], "does not divide"),
    ({"zero": 1, "zero_shard_size": 2}, ["zero=1", "zero-shard-size=2"], ""),
    ({"pp": 2, "schedule": "none"}, ["pp=2", "schedule=none"], "one stage"),
    ({"pp": 1, "schedule": "1f1b"}, ["pp=1", "schedule=1f1b"], "needs pp > 1"),
    ({"tp": 8, "schedule": "gpipe"}, ["tp=8", "schedule=gpipe"], "needs pp > 1"),
    ({"pp": 1, "stages_per_rank": 2}, ["pp=1", "stages-per-rank=2"], "need pp > 1"),
    ({"pp": 4, "stages_per_rank": 2}, ["pp=4", "stages-per-rank=2"], "needs 8 pieces"),
    ({"schedule": "1f1b", "stages_per_rank": 2}, ["schedule=1f1b", "stages-per-rank=2"], "one stage per rank"),
    ({"schedule": "zero-bubble-v", "stages_per_rank": 1}, ["schedule=zero-bubble-v", "stages-per-rank=1"], "2 stages"),
    ({"schedule": "sequential", "microbatch_size": 1}, ["schedule=sequential", "microbatch-size=1"], "one microbatch"),
    ({"dp": 4, "batch_shares": (3, 1)}, ["batch-shares=3,1", "dp=4"], "names 2 dp ranks"),
    ({"pp": 8, "batch_shares": (3, 1)}, ["pp=8"], ""),
    ({"zero": 3, "batch_shares": (3, 1)}, ["batch-shares=3,1", "zero=3"], "in every microbatch"),
    ({"zero": 2, "stages_per_rank": 2, "batch_shares": (3, 1)},
     ["batch-shares=3,1", "zero=2", "stages-per-rank=2"], "as its microbatches come"),
    ({"batch_shares": (3,)}, ["batch-shares=3"], "two or more"),
    ({"microbatch_size": 6, "batch_shares": (3, 1)}, ["batch-shares=3,1", "microbatch-size=6"], "do not deal out 2"),
    ({"pp": 2, "dp": 4, "schedule": "sequential", "microbatch_size": 1},
     ["schedule=sequential", "microbatch-size=1"], "one microbatch"),
]  # fmt: skip


@pytest.mark.parametrize(
    "more", [{"zero": 3}, {"activation_checkpoint": "full"}, {"activation_checkpoint": "selective"}]
)
def test_split_backwards_go_with_every_policy(more):
    assert refusal({"pp": 2, "schedule": "zero-bubble", **more}) is None


@pytest.mark.parametrize(("chosen", "names", "reason"), CASES, ids=lambda value: str(value) if value else "-")
def test_a_clash_names_what_clashes(chosen, names, reason):
    error = refusal(chosen)
    assert error is not None
    for name in names:
        assert name in error.what
    assert reason in error.what
    assert error.fix
    for name, value in chosen.items():  # those that have no part in it are not blamed
        shown = f"{name.replace('_', '-')}={value}"
        assert shown in names or shown not in names_in(error) or len(chosen) <= 2


def test_every_pair_of_pins_is_allowed_or_named():
    alone = {(name, value): refusal({name: value}) for name, values in VALUES.items() for value in values}
    clashes = 0
    for (a, x), (b, y) in combinations(alone, 2):
        if a == b:
            continue
        error = refusal({a: x, b: y})
        refused = [pin for pin in ((a, x), (b, y)) if alone[pin] is not None]
        if error is None:
            assert not refused
            continue
        assert error.fix, error
        # One that is impossible by itself is named alone; else both are, whichever rule found out.
        wanted = refused[:1] or [(a, x), (b, y)]
        named = [pin for pin in ((a, x), (b, y)) if is_named(error.what, *pin)]
        assert set(named) >= set(wanted) or (refused and set(named) & set(refused)), error
        clashes += not refused
    assert clashes > 50


small = residual_mlp(batch=BATCH, depth=2)
any_pins = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=any_pins, gpus=st.sampled_from((1, 2, 4, 8)), may_split=st.booleans(), batch=st.sampled_from((8, 12)))
def test_any_pins_give_a_plan_that_has_them_or_an_error(chosen, gpus, may_split, batch):
    pins = pins_of(chosen)
    setting = Setting(
        graph=small if batch == BATCH else residual_mlp(batch=batch, depth=2), gpus=gpus,
        cluster=load_cluster("h100-sxm"), stack=load_stack("eager"), precision="fp32", optimizer="adamw", pins=pins,
        tp_may_split_batch=may_split,
    )  # fmt: skip
    try:
        pins.check()
        best = search(setting).best
    except (AutoparError, NothingFits):
        return
    assert all(best.mesh.sizes[axis] == size for axis, size in pins.mesh.items())
    assert pins.zero in (None, best.zero)
    assert pins.schedule in (None, best.schedule)
    assert pins.activation_checkpoint in (None, best.activation_checkpoint)
    assert pins.stages_per_rank in (None, len(best.stages) // best.mesh.pp)
    assert pins.microbatch_size in (None, batch // best.mesh.dp // best.mesh.microbatches)
    assert pins.zero_shard_size in (None, best.mesh.shards)
    if pins.batch_shares is not None:
        counts = [best.mesh.share(rank) for rank in range(best.mesh.dp)]
        parts = sum(counts) // sum(pins.batch_shares)
        assert counts == [parts * part for part in pins.batch_shares]
    assert best.mesh.world_size == gpus


def test_the_reason_is_that_of_the_mesh_that_comes_nearest():
    error = refusal({"zero_shard_size": 3})
    assert error is not None
    assert error.what.endswith("does not divide dp=4")  # of batch 12 on 8 GPUs; not that dp may be 1


def test_shares_that_deal_out_nothing_name_the_sums_that_do():
    error = refusal({"batch_shares": (7, 2)})
    assert error is not None
    assert error.fix == "shares of --batch-shares can add up to 2, 3, 4, 6, 12; or leave it out"


def test_a_pin_too_many_is_not_blamed():
    error = refusal({"pp": 2, "dp": 2, "tp": 2, "zero": 1, "schedule": "1f1b", "stages_per_rank": 2})
    assert error is not None
    assert error.what.startswith("schedule=1f1b and stages-per-rank=2 contradict each other")
    assert replace(pins_of({}), zero=1).described() == {"zero": "1"}
