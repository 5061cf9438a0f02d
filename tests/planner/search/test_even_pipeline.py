"""How long even pipelines take: beside what plans of every cut take, and with fewer ranks in place of many."""

from itertools import combinations

import pytest
from autopar.planner.schedules import get_schedule
from autopar.planner.search.even_pipeline import EvenPipelines, _fewer, _steps
from autopar.planner.sharding.mesh import Mesh
from batch_evaluators import evaluator
from graphs import residual_mlp

_PIPELINES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2))


@pytest.mark.parametrize("pipeline", _PIPELINES)
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_no_cut_is_seen_to_be_faster(pipeline, microbatches):
    name, per_rank = pipeline
    if get_schedule(name).refuse(2, per_rank, microbatches):
        pytest.skip("the schedule does not run so")
    graph = residual_mlp(batch=8192, width=256, hidden=1024, depth=6)
    priced = evaluator(graph, Mesh(pp=2, microbatches=microbatches))
    units, whole = len(graph.units), priced.costs.whole(0, "none")
    steps = [
        priced.evaluate(
            tuple(zip((0, *ends), (*ends, units), strict=True)), schedule=name, zero=0, activation_checkpoint="none"
        ).step_seconds
        for ends in combinations(range(2, units), 2 * per_rank - 1)
    ]
    passes = EvenPipelines(priced).passes(pipeline, whole, whole.busy_seconds)
    assert passes * whole.busy_seconds <= min(steps) * 1.01
    assert passes > microbatches / 2  # ranks wait


@pytest.mark.parametrize("pipeline", _PIPELINES)
def test_fewer_ranks_stand_for_many(pipeline):
    name, per_rank = pipeline
    assert _fewer(name, 64, 128, per_rank) == 4
    shape = per_rank, 16, 16, 1  # forward, weights, send of 50
    many = _steps(name, 64, 128, *shape) / 64
    few = _steps(name, 16, 32, *shape) / 16
    assert few == pytest.approx(many, rel=0.05)
    assert few <= many


def test_what_the_schedule_refuses_is_not_made_smaller():
    assert get_schedule("interleaved").refuse(16, 2, 20)
    assert _fewer("interleaved", 32, 40, 2) == 1
    assert _fewer("1f1b", 8, 64, 1) == 1
