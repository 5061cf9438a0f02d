"""Searches under limits of memory, against every plan there is."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.planner.capture.graph import ModelGraph
from autopar.planner.search.pins import Pins
from autopar.planner.search.sweep import Setting, search
from oracle import Machine, Price, every_plan

CLUSTER, STACK = load_cluster("h100-sxm"), load_stack("eager")


def compare(
    graph: ModelGraph, pins: Pins, limits: int, rng: random.Random, of_blocks: Callable[[Price], tuple[object, ...]]
) -> int:
    """Searches under limits of memory against every plan; in how many the best was one whose blocks differ."""
    cluster = replace(CLUSTER, gpu=replace(CLUSTER.gpu, overhead_bytes=0))
    machine = Machine(cluster, slowdown=(1.0, 1.0), hbm_bytes=(cluster.gpu.hbm_bytes,) * 2)
    plans = list(every_plan(graph, 2, machine, STACK, pins))
    mixed = 0
    sizes = sorted({plan.memory_bytes for plan in plans})
    for limit in rng.sample(sizes, min(limits, len(sizes))):
        fitting = [plan for plan in plans if plan.memory_bytes <= limit]
        best = min(fitting, key=lambda plan: plan.seconds)
        limited = replace(cluster, gpu=replace(cluster.gpu, hbm_bytes=limit))
        setting = Setting(
            graph=graph, gpus=2, cluster=limited, stack=STACK, precision="fp32", optimizer="adamw", pins=pins
        )
        exact = search(replace(setting, exact=True))
        assert exact.best.cost.step_seconds == pytest.approx(best.seconds, rel=1e-6), best
        default = search(setting)
        assert default.bound_seconds <= best.seconds * (1 + 1e-6)
        assert default.best.cost.step_seconds <= 1.01 * best.seconds
        alike = [plan for plan in fitting if len(set(of_blocks(plan))) == 1]
        mixed += all(plan.seconds > best.seconds * (1 + 1e-9) for plan in alike)
    return mixed
