from dataclasses import replace

import pytest
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack
from autopar.cost_models.units import format_seconds
from autopar.planner.errors import AutoparError
from autopar.planner.explain import comparison, explanations
from autopar.planner.gradient_sync import gradient_sync_table
from autopar.planner.plan import Plan
from autopar.planner.search.prices import Prices
from autopar.planner.sharding.mesh import Mesh


def test_says_where_a_runner_up_loses_and_gains(example_plan: Plan) -> None:
    plan = example_plan
    slower = replace(plan.alternatives[0], time_breakdown_seconds={"compute": 0.06, "dp": 0.12})
    text = " ".join(explanations(replace(plan, alternatives=(slower,))))
    assert "dp=8 (dp only) is predicted 20.0% slower" in text
    assert "dp communication +120 ms, compute -40.0 ms, bubble -30 ms" in text


def test_names_axes_that_the_plan_itself_lacks(example_plan: Plan) -> None:
    assert "cp" not in example_plan.mesh
    slower = replace(example_plan.alternatives[0], mesh={"cp": 8}, time_breakdown_seconds={"cp": 0.9})
    text = " ".join(explanations(replace(example_plan, alternatives=(slower,))))
    assert "cp communication +900 ms" in text


def test_says_what_fills_the_memory_of_a_runner_up(example_plan: Plan) -> None:
    plan = example_plan
    gib = 2**30
    held = {"activations": 70 * gib, "parameters": 15 * gib, "overhead": 5 * gib}
    fuller = replace(plan.alternatives[1], memory_breakdown_bytes=held)
    text = " ".join(explanations(replace(plan, alternatives=(fuller,))))
    assert "10 GiB too much: activations 70 GiB and parameters 15 GiB" in text


def test_says_which_parallelism_the_model_favours(example_plan: Plan) -> None:
    plan = example_plan
    stage = plan.stages[0]
    gradients = 4 * stage.num_parameters
    for activations, leans in ((100 * gradients, "favours data"), (gradients // 100, "favours model")):
        memory = {**stage.memory_bytes, "activations": max(1, activations // plan.microbatches)}
        changed = replace(plan, stages=(replace(stage, memory_bytes=memory),), mesh={"pp": 1, "dp": 8, "tp": 1})
        assert leans in " ".join(explanations(changed))


def test_says_where_memory_does_not_suffice(example_plan: Plan) -> None:
    plan = replace(example_plan, memory_capacity_bytes=7 * 2**30)
    assert "Memory does not suffice: stage 0 needs 8 GiB of 7 GiB" in " ".join(explanations(plan))


def test_compares_with_a_plan_of_the_user(example_plan: Plan) -> None:
    plan = example_plan
    pinned = replace(plan, step_seconds=0.3, time_breakdown_seconds={"compute": 0.1, "tp": 0.2})
    assert "100.0% slower: tp communication +180 ms, bubble -30 ms" in comparison(plan, pinned)
    assert "50.0% faster; this plan spends more on tp communication +180 ms" in comparison(pinned, plan)
    with pytest.raises(AutoparError, match="different batches: "):
        comparison(plan, replace(plan, batch_size=plan.batch_size * 2))
    with pytest.raises(AutoparError, match="takes no time"):
        comparison(replace(plan, step_seconds=0.0), pinned)


def test_says_why_dp_ranks_take_different_shares(example_plan: Plan) -> None:
    plan = replace(example_plan, batch_shares=(6, 2), dp_paces=((1.0, 1.0), (1.0, 3.0)))
    text = " ".join(explanations(plan))
    assert "take 6 and 2 microbatches of the batch because they are not equally fast" in text
    assert "the slowest needs 3 times as long as the fastest" in text
    assert "as pinned" in " ".join(explanations(replace(plan, pins={"batch-shares": "3,1"})))
    assert "microbatches of the batch" not in " ".join(explanations(example_plan))


def test_compares_ways_to_add_up_gradients(example_plan: Plan) -> None:
    (scatter,) = (use for use in example_plan.collectives if use.op == "reduce_scatter")
    table = gradient_sync_table(example_plan)
    assert [(over, way.split(" ")[0], size) for over, way, size, _ in table.rows] == [
        ("dp=2", way, "256 KiB") for way in ("all_reduce", "reduce_scatter,", "parameter")
    ]
    assert gradient_sync_table(replace(example_plan, precision="bf16")).rows[0][2] == "128 KiB"
    assert gradient_sync_table(replace(example_plan, collectives=())).rows == ()
    uses = (
        replace(scatter, axis="dp_cp", op="all_reduce", count=1, num_bytes=2**21, reason="partial gradients"),
        replace(scatter, axis="ep", op="all_reduce", count=1, num_bytes=2**18, reason="partial gradients", stage=1),
    )
    several = replace(example_plan, mesh={"pp": 1, "dp": 2, "ep": 2, "cp": 2, "tp": 1}, collectives=uses)
    rows = gradient_sync_table(several).rows
    assert [(over, size) for over, _, size, _ in rows] == [("dp_cp=4", "2 MiB")] * 3 + [("ep=2", "256 KiB")] * 3


def test_adding_up_gradients_costs_what_the_search_says(example_plan: Plan) -> None:
    (scatter,) = (use for use in example_plan.collectives if use.op == "reduce_scatter")
    sizes = {"pp": 2, "dp": 4, "ep": 2, "cp": 4, "tp": 1}
    prices = Prices(mesh=Mesh(**sizes, replicas=2), cluster=load_cluster("h100-sxm"), stack=load_stack("eager"))
    for axis, ranks in (("cp", 4), ("dp_cp", 16), ("dp_shard", 8), ("dp_replicate", 2), ("ep", 2)):
        use = replace(scatter, axis=axis, op="all_reduce", count=1, num_bytes=2**24)
        plan = replace(example_plan, mesh=sizes, zero_shard_size=8, collectives=(use,))
        over, _, _, seconds = gradient_sync_table(plan).rows[0]
        assert over == f"{axis}={ranks}"
        assert seconds == format_seconds(prices.use_seconds(axis, "all_reduce", 2**24))
