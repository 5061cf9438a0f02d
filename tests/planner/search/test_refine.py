"""The program of the whole step beside the sweep: solved where it can matter, and as far."""

from dataclasses import replace
from itertools import product
from math import inf

import pulp
import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.cost_models.stacks.profile import CHOICES
from autopar.planner.search.answer import Setting
from autopar.planner.search.assignment import NoAssignment
from autopar.planner.search.candidates import Pins, possible_meshes
from autopar.planner.search.exact import floor_seconds, joint_problem, model_of
from autopar.planner.search.policies import shardings_for
from autopar.planner.search.pricing import Pricer
from autopar.planner.search.refine import Refiner
from autopar.planner.search.solver import run_solver
from autopar.planner.search.step_model import Policy
from autopar.planner.search.sweep import _Sweep, search
from autopar.planner.sharding.mesh import Mesh
from graphs import residual_mlp

SETTING = Setting(
    graph=residual_mlp(batch=8, width=16, hidden=32, depth=2), gpus=4, cluster=load_cluster("h100-sxm"),
    stack=load_stack("eager"), precision="fp32", optimizer="adamw", pins=Pins(mesh={"dp": 2, "tp": 2}),
)  # fmt: skip


def knapsack() -> pulp.LpProblem:
    """The least weight of at least 100 of 12 items."""
    lp = pulp.LpProblem("knapsack", pulp.LpMinimize)
    columns = [lp.add_variable(f"x{k:02d}", 0, 1, pulp.LpInteger) for k in range(12)]
    weights = [17 + (7 * k * k) % 23 for k in range(12)]
    values = [19 + (5 * k * k) % 17 for k in range(12)]
    lp.setObjective(pulp.LpAffineExpression([(c, float(w)) for c, w in zip(columns, weights, strict=True)]))
    terms = [(c, float(v)) for c, v in zip(columns, values, strict=True)]
    lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(terms), pulp.LpConstraintGE, rhs=100.0))
    return lp


def solved(cutoff: float) -> float:
    lp = knapsack()
    try:
        run_solver(lp, as_mip=True, cutoff=cutoff)
    except NoAssignment:
        return inf
    return pulp.value(lp.objective)


def test_a_cutoff_changes_no_answer_below_it_and_lets_no_other_through():
    least = solved(inf)
    assert solved(least + 0.5) == pytest.approx(least)
    assert solved(least - 0.5) >= least


STACKS = [
    *(({"states": states}, zero) for states in CHOICES["states"] for zero in (0, 1, 3)),
    *(({"accumulation": accumulation}, zero) for accumulation in CHOICES["accumulation"] for zero in (2, 3)),
]


@pytest.mark.parametrize(("changes", "zero"), STACKS, ids=str)
def test_what_a_plan_takes_of_memory_the_program_leaves_it(changes, zero):
    """Whatever a stack holds of parameters: a device of just that size has room for the plan in the program too."""
    stack = replace(load_stack("eager"), **changes)
    graph = residual_mlp(batch=8, width=1024, hidden=2048, depth=2)
    pins = Pins(mesh={"dp": 4}, zero=zero, activation_checkpoint="none", microbatch_size=1)
    roomy = replace(SETTING, graph=graph, stack=stack, precision="bf16", pins=pins)
    best = search(roomy).best
    gpu = replace(roomy.cluster.gpu, hbm_bytes=best.cost.memory_bytes)
    tight = replace(roomy, cluster=replace(roomy.cluster, gpu=gpu))
    leaves = _Sweep(tight, lambda text: None)._leaves()
    uses = leaves.uses(best.outer)
    joint = joint_problem(leaves, uses)
    policy = Policy(stages=best.stages, zero=best.zero, schedule=best.schedule, activation_checkpoint="none")
    bound, _ = model_of(tight, joint, best.outer, policy).solve(as_mip=False)
    assert bound <= best.cost.step_seconds * (1 + 1e-9)


def test_where_memory_is_no_matter_recomputation_is_not_tried(monkeypatch):
    """The same placements would only be slower."""
    tried: list[object] = []
    price = Pricer.leaf

    def counted(self, mesh, placements, policy, best):
        tried.append(policy.activation_checkpoint)
        return price(self, mesh, placements, policy, best)

    monkeypatch.setattr(Pricer, "leaf", counted)
    found = search(SETTING)
    assert set(tried) == {"none"}
    assert len(tried) <= len(shardings_for(SETTING.graph, found.best.mesh, SETTING.pins, SETTING.cluster))
    assert found.best.cost.step_seconds <= 1.01 * search(replace(SETTING, exact=True)).best.cost.step_seconds


def refiner() -> Refiner:
    sweep = _Sweep(replace(SETTING, pins=Pins(mesh={})), lambda text: None)
    return Refiner(sweep.setting, sweep._leaves())


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2, microbatches=2), Mesh(pp=2, dp=2, microbatches=4)])
def test_policies_share_a_program_and_do_not_disturb_each_other(mesh):
    mine = refiner()
    uses = mine.leaves.uses(mesh)
    shared = joint_problem(mine.leaves, uses)
    last = len(SETTING.graph.units)
    half = last // 2
    stages = ((0, half), (half, last)) if mesh.pp == 2 else ((0, last),)
    mixed = tuple("full" if 0 < unit < half else "none" for unit in range(last))
    for checkpoint, zero in product(("none", "selective", "full", mixed, "none"), (0, 2, 3)):
        policy = Policy(
            stages=stages, zero=zero, schedule="1f1b" if mesh.pp == 2 else "none", activation_checkpoint=checkpoint
        )
        alone = model_of(mine.setting, joint_problem(mine.leaves, uses), mesh, policy).solve(as_mip=False)[0]
        assert model_of(mine.setting, shared, mesh, policy).solve(as_mip=False)[0] == pytest.approx(alone, rel=1e-9)


def test_one_program_bounds_all_meshes_of_equal_local_sizes_nearly_as_well_as_their_own():
    """Only messages over dp are left out of it."""
    mine = refiner()
    sweep = _Sweep(mine.setting, lambda text: None)
    every = possible_meshes(sweep.space, sweep.batch, 4, Pins(mesh={}))[0]
    alike = [mesh for mesh in every if mesh.dp * mesh.microbatches == 8 and mesh.tp == 1 and mesh.microbatches > 1]
    alike = [mesh for mesh in alike if mesh.dp > 1]
    assert len(alike) > 1
    for mesh in alike:
        own = floor_seconds(mine.setting, joint_problem(mine.leaves, mine.leaves.uses(mesh)), mesh)
        assert 0.95 * own <= mine._floor(mesh, alike) <= own * (1 + 1e-9)


def test_twice_the_blocks_ask_for_no_more_programs():
    few, many = (
        search(replace(SETTING, graph=residual_mlp(batch=8, width=16, hidden=32, depth=depth), pins=Pins(mesh={})))
        for depth in (4, 8)
    )
    assert many.solved <= few.solved
