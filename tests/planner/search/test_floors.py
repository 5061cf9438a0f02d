"""No cut is faster than the floor of its policy, or needs less: over every cut of small pipelines."""

from itertools import combinations, product
from math import inf

import pytest
from autopar.planner.checkpointing import POLICIES
from autopar.planner.schedules import get_schedule
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.even_pipeline import EvenPipelines
from autopar.planner.search.floors import fitting_seconds, floor_bytes, floor_seconds
from autopar.planner.search.space import Space
from autopar.planner.sharding.mesh import Mesh
from batch_evaluators import evaluator
from graphs import residual_mlp
from random_graphs import random_graph

PIPELINES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("sequential", 1))


@pytest.mark.parametrize("seed", range(12))
def test_every_cut_is_slower_and_fuller(seed):
    graph = random_graph(seed, most_nodes=5)
    if find_batch_split(Space(graph)).placements is None:
        graph = random_graph(seed + 100, most_nodes=5)
    units, looked_at = len(graph.units), 0
    for pp, dp, microbatches in ((1, 2, 1), (2, 1, 2), (2, 2, 1), (2, 1, 1), (3, 1, 3)):
        if graph.batch_size % (dp * microbatches):
            continue
        priced = evaluator(graph, Mesh(pp=pp, dp=dp, microbatches=microbatches))
        for pipeline in PIPELINES if pp > 1 else (("none", 1),):
            schedule, num_stages = get_schedule(pipeline[0]), pp * pipeline[1]
            if schedule.refuse(pp, pipeline[1], microbatches) or num_stages > units - 1:
                continue
            for zero in (0, 1, 2, 3) if dp > 1 else (0,):
                for checkpoint in ("none", "selective", "full"):
                    least_seconds = floor_seconds(priced, pipeline, zero, checkpoint)
                    least_bytes = floor_bytes(priced, pipeline, zero, checkpoint)
                    for ends in combinations(range(2, units), num_stages - 1):
                        bounds = (0, *ends, units)
                        cost = priced.evaluate(
                            tuple(zip(bounds, bounds[1:], strict=False)),
                            schedule=pipeline[0], zero=zero, activation_checkpoint=checkpoint,
                        )  # fmt: skip
                        looked_at += 1
                        assert least_seconds <= cost.step_seconds
                        assert least_bytes <= cost.memory_bytes
                        if pp == 1:
                            assert least_seconds == pytest.approx(cost.step_seconds)
    assert looked_at


def test_uneven_cuts_of_equal_units_are_no_faster():
    graph = residual_mlp(batch=8192, width=1024, hidden=4096, depth=6)
    units = len(graph.units)
    for pp, microbatches in ((2, 2), (2, 4)):
        priced = evaluator(graph, Mesh(pp=pp, microbatches=microbatches))
        steps = [
            priced.evaluate(
                tuple(zip((0, *ends), (*ends, units), strict=True)),
                schedule="1f1b", zero=0, activation_checkpoint="none",
            ).step_seconds
            for ends in combinations(range(2, units), pp - 1)
        ]  # fmt: skip
        assert floor_seconds(priced, ("1f1b", 1), 0, "none") <= min(steps)


@pytest.mark.parametrize(("pp", "dp", "microbatches"), [(1, 2, 2), (2, 1, 2), (2, 2, 4), (3, 1, 4)])
def test_what_fits_is_slower_whatever_runs_again(pp, dp, microbatches):
    graph = residual_mlp(batch=8192, width=256, hidden=1024, depth=3)
    units, tight = len(graph.units), 0
    mixes = list(
        product(*(POLICIES if graph.templates[unit.template].is_module else ("none",) for unit in graph.units))
    )
    priced = evaluator(graph, Mesh(pp=pp, dp=dp, microbatches=microbatches))
    for pipeline in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)) if pp > 1 else (("none", 1),):
        num_stages = pp * pipeline[1]
        if get_schedule(pipeline[0]).refuse(pp, pipeline[1], microbatches):
            continue
        for zero in (0, 2, 3) if dp > 1 else (0,):
            costs = [
                priced.evaluate(
                    tuple(zip((0, *ends), (*ends, units), strict=True)),
                    schedule=pipeline[0], zero=zero, activation_checkpoint=mix,
                )
                for ends in combinations(range(2, units), num_stages - 1)
                for mix in mixes
            ]  # fmt: skip
            plain = floor_seconds(priced, pipeline, zero, "none")
            rooms = sorted({cost.memory_bytes for cost in costs})
            for room in rooms[:: max(1, len(rooms) // 8)]:
                least = fitting_seconds(EvenPipelines(priced), priced, pipeline, zero, POLICIES, [room] * pp).least
                assert least <= min(cost.step_seconds for cost in costs if cost.memory_bytes <= room)
                tight += least > plain
            assert (
                fitting_seconds(EvenPipelines(priced), priced, pipeline, zero, POLICIES, [rooms[0] / 2] * pp).least
                == inf
            )
    assert tight
