"""Choices that only stacks of published software make: what they cost in time and memory beside the emitted package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from autopar.cost_models.errors import HardwareError
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.memory import Memory
from autopar.cost_models.stacks import CHOICES, Stack, load_stack
from autopar.planner.capture import capture_model
from autopar.planner.capture.graph import Kind, ModelGraph
from autopar.planner.schedules import Alive
from autopar.planner.search.batch import find_batch_split
from autopar.planner.search.evaluate import Evaluator
from autopar.planner.search.held_parameters import HeldParameter
from autopar.planner.search.holdings import Holdings
from autopar.planner.search.kernels import stack_works
from autopar.planner.search.least_memory import States
from autopar.planner.search.parameter_seconds import ParameterSeconds
from autopar.planner.search.pipeline_buffers import buffered, microbatches_kept
from autopar.planner.search.placements_ilp import solve
from autopar.planner.search.prices import Prices, in_precision
from autopar.planner.search.problem import build_problem
from autopar.planner.search.space import Rules, Space
from autopar.planner.search.stage_cost import PricedStage, StageCost
from autopar.planner.search.stage_memory import StageMemory
from autopar.planner.search.step_collectives import stage_values
from autopar.planner.search.step_uses import Uses
from autopar.planner.search.unit_costs import Seconds
from autopar.planner.sharding.mesh import MICROBATCH, Mesh
from autopar.planner.sharding.placement import Pair
from autopar.planner.sharding.program import Compute, Placements

EAGER = load_stack("eager")
H100 = load_cluster("h100-sxm")
SAMPLES = Path(__file__).parents[3] / "sample_models"
GIB = 1 << 30


def with_choices(**choices: str) -> Stack:
    return replace(EAGER, **choices)


def held(fqn: str, group: str, dtype: str) -> HeldParameter:
    return HeldParameter(
        fqn=fqn, shape=(8192, 8192), dtype=dtype, trainable=True, partial=frozenset(), group=group
    )  # fmt: skip


def weights(dtype: str) -> Holdings:
    """A head, and three blocks of one matrix each."""
    return Holdings.of([held(name, group, dtype) for name, group in zip("habc", ("", "1", "2", "3"), strict=True)])


WEIGHTS, STORED = weights("bfloat16"), weights("float32")


def prices(stack: Stack, *, microbatches: int = 4, tp: int = 1, dp: int = 8) -> Prices:
    return Prices(mesh=Mesh(dp=dp, tp=tp, microbatches=microbatches), cluster=H100, stack=stack)


def data_parallel(stack: Stack, *, tp: int = 1, compute: float = 0.0) -> float:
    seconds = ParameterSeconds(prices=prices(stack, tp=tp, dp=8 // tp), optimizer="adamw")
    return seconds.data_parallel(WEIGHTS, 3, compute, compute)


def test_blocks_are_gathered_in_each_pass_and_the_root_once_a_microbatch() -> None:
    stack = with_choices(accumulation="unsharded gradients")
    made = prices(stack)
    size = 2 * 8192 * 8192
    gather, scatter = (made.use_seconds("dp", op, size) for op in ("all_gather", "reduce_scatter"))
    assert data_parallel(stack) == pytest.approx(4 * (3 + 3 + 1) * gather + 4 * scatter)
    # The emitted package keeps parameters from one backward to the next.
    assert data_parallel(EAGER) == pytest.approx((4 * 3 + 3 + 1) * gather + 4 * scatter)


def test_beside_tensor_parallelism_only_the_forward_hides_what_fsdp_exchanges() -> None:
    hiding = with_choices(accumulation="unsharded gradients")
    showing = replace(hiding, fsdp_overlap="forward with tp")
    assert data_parallel(showing, compute=1.0) == data_parallel(hiding, compute=1.0)
    assert data_parallel(showing, tp=2, compute=1.0) > 1.5 * data_parallel(hiding, tp=2, compute=1.0)
    assert data_parallel(showing, tp=2, compute=1.0) < data_parallel(showing, tp=2)


def test_blocks_gathered_in_8_bits_take_half() -> None:
    stack = with_choices(gathered_dtype="float8")
    less = data_parallel(EAGER) - data_parallel(stack)
    made, size = prices(EAGER), 2 * 8192 * 8192
    each = made.use_seconds("dp", "all_gather", size) - made.use_seconds("dp", "all_gather", size // 2)
    assert less == pytest.approx((4 * 3 + 3) * each)


@pytest.mark.parametrize(("gradient_dtype", "item"), [("compute", 2), ("float32", 4)])
def test_whole_gradients_are_kept_in_the_dtype_that_they_are_added_in(gradient_dtype: str, item: int) -> None:
    stack = with_choices(accumulation="unsharded gradients", gradient_dtype=gradient_dtype)
    elements = 8192 * 8192
    made = StageMemory(prices=prices(stack), optimizer="adamw", precision="bf16")
    memory = made.without_activations(0, WEIGHTS, STORED, 3)
    assert memory.gather_buffers == 4 * item * elements + 2 * 2 * elements
    assert memory.gradients == 0
    one = StageMemory(prices=prices(stack, microbatches=1), optimizer="adamw", precision="bf16")
    assert one.without_activations(0, WEIGHTS, STORED, 3).gradients == 4 * elements // 8 * 4


@pytest.mark.parametrize("states", CHOICES["states"])
def test_masters_of_the_optimizer_are_split_with_its_state(states: str) -> None:
    stack, elements = with_choices(states=states), 4 * 8192 * 8192
    shares = {"float32 master": 1.0, "compute dtype": 0.0}
    for zero, dp in ((0, 8), (1, 8), (1, 2)):
        made = StageMemory(prices=prices(stack, dp=dp), optimizer="adamw", precision="bf16")
        memory = made.without_activations(0, WEIGHTS, STORED, zero)
        split = 1 / dp if zero else 1.0
        assert memory.master_weights == shares.get(states, split) * 4 * elements
        assert memory.parameters == 2 * elements
        least = States(trained_bytes=4 * elements, optimizer="adamw", stack=stack)
        assert least.held(Mesh(dp=dp, microbatches=4), zero, dp) <= memory.total_bytes - memory.gather_buffers


@pytest.mark.parametrize(("dtype", "passes"), [("bfloat16", 3), ("float16", 5), ("float32", 0)])
def test_copies_around_the_optimizer(dtype: str, passes: int) -> None:
    plain, copied = (
        ParameterSeconds(prices=prices(stack), optimizer="adamw").optimizer_step(weights(dtype), STORED, 0)
        for stack in (EAGER, with_choices(updates="copied"))
    )
    traffic = passes * 4 * 4 * 8192 * 8192
    assert copied - plain == pytest.approx(traffic / (H100.gpu.hbm_bytes_per_second * H100.gpu.hbm_fraction))


# --- on a model ---


@pytest.fixture(scope="module")
def gpt() -> ModelGraph:
    arguments = {"num_layers": 2, "width": 512, "hidden": 2048, "num_heads": 8, "context": 256, "vocab_size": 1024}
    return capture_model(SAMPLES / "gpt.py", name="build", arguments=arguments, batch_size=4, guarded=False).graph


def placed(graph: ModelGraph, tp: int, rules: Rules | None = None) -> Placements:
    """Every operation splits its samples over dp, and tp as the integer program has it."""
    space = Space(graph)
    batch = find_batch_split(space).placements
    assert batch is not None
    fixed = tuple({n: {MICROBATCH: labels[MICROBATCH]} for n, labels in p.items()} for p in batch)
    rules = rules or Rules()

    def made(tp: int) -> Prices:
        return Prices(mesh=Mesh(dp=2, tp=tp, microbatches=2), cluster=H100, stack=EAGER)

    on_dp = build_problem(space, made(1).axes, ("dp",), fixed, replace(rules, batch=batch), made(1), 2)
    both = on_dp.placements(space, solve(on_dp.problem))
    if tp == 1:
        return both
    named = tuple({n: {MICROBATCH: v[MICROBATCH]} for n, v in p.items() if MICROBATCH in v} for p in both)
    on_tp = build_problem(space, made(tp).axes, ("tp",), both, replace(rules, batch=named), made(tp), 2)
    return on_tp.placements(space, solve(on_tp.problem))


@pytest.fixture(scope="module")
def on_two(gpt: ModelGraph) -> Placements:
    return placed(gpt, 2)


def first_block(graph: ModelGraph) -> int:
    return next(i for i, unit in enumerate(graph.units) if graph.templates[unit.template].is_module)


def evaluator(graph: ModelGraph, stack: Stack, *, tp: int, placements: Placements, pp: int = 1) -> Evaluator:
    mesh = Mesh(pp=pp, dp=2, tp=tp, microbatches=2)
    return Evaluator(
        graph=in_precision(graph, "bf16"),
        master=graph,
        placements=placements,
        prices=Prices(mesh=mesh, cluster=H100, stack=stack),
        optimizer="adamw",
        precision="bf16",
    )


def test_operands_of_products_in_8_bits_are_cast(gpt: ModelGraph, on_two: Placements) -> None:
    plain = evaluator(gpt, EAGER, tp=2, placements=on_two)
    chosen = with_choices(products="float8")
    block = next(t for t in plain.program.templates if t.template.is_module)
    before, after = stack_works(block, EAGER), stack_works(block, chosen)
    linear = [
        (a, b)
        for step, a, b in zip(block.steps, before, after, strict=True)
        if isinstance(step, Compute) and step.node.op == "aten.linear.default" and a is not None and b is not None
    ]
    assert len(linear) == 4
    for a, b in linear:
        (gemm,) = b.forward.gemms
        assert (a.dtype, b.dtype) == ("bfloat16", "float8_e4m3fn")
        operands = (gemm.m + gemm.n) * gemm.k
        assert b.forward.bytes == operands + 2 * gemm.m * gemm.n + 4 * operands
        assert b.forward.gemms == a.forward.gemms
    outside = [t for t in plain.program.templates if not t.template.is_module]
    assert all(stack_works(t, EAGER) == stack_works(t, chosen) for t in outside)


def test_devices_without_8_bits_say_so(gpt: ModelGraph, on_two: Placements) -> None:
    made = evaluator(gpt, with_choices(products="float8"), tp=2, placements=on_two)
    old = replace(made, prices=replace(made.prices, cluster=load_cluster("a100-80g-sxm")))
    with pytest.raises(HardwareError, match="float8"):
        old.unit(first_block(gpt), recompute="none")


def test_gradients_of_inputs_hide_behind_those_of_weights(gpt: ModelGraph, on_two: Placements) -> None:
    plain, hidden = (
        evaluator(gpt, stack, tp=2, placements=on_two).unit(first_block(gpt), recompute="none")
        for stack in (EAGER, with_choices(tp_overlap="weight gradients"))
    )
    assert hidden.forward == plain.forward
    assert 0 < hidden.backward.tp < plain.backward.tp
    assert hidden.backward.compute == plain.backward.compute


def uses_of(graph: ModelGraph, stack: Stack) -> Uses:
    """What the lower bounds of a search charge for every option."""
    made = Prices(mesh=Mesh(dp=2, tp=2, microbatches=2), cluster=H100, stack=stack)
    space = Space(in_precision(graph, "bf16"))
    batch = find_batch_split(space).placements
    assert batch is not None
    fixed = tuple({n: {MICROBATCH: labels[MICROBATCH]} for n, labels in p.items()} for p in batch)
    uses = Uses(space, made)
    build_problem(space, made.axes, ("dp", "tp"), fixed, Rules(batch=batch), uses, 2)
    return uses


def test_bounds_leave_out_what_may_hide_behind_weights(gpt: ModelGraph) -> None:
    plain, hidden = uses_of(gpt, EAGER), uses_of(gpt, with_choices(tp_overlap="weight gradients"))
    fewer = 0
    for key, move in plain.moves.items():
        other = hidden.moves[key]
        assert (move is None) == (other is None)
        if move is not None and other is not None:
            assert other.messages[0] == move.messages[0]
            assert move.messages[1] * 0.2 * (1 - 1e-9) <= other.messages[1] <= move.messages[1]
            fewer += other.messages[1] < move.messages[1]
    assert fewer > 10


def test_bounds_know_products_in_8_bits(gpt: ModelGraph) -> None:
    plain, cast = uses_of(gpt, EAGER), uses_of(gpt, with_choices(products="float8"))
    differing = {key[1] for key, use in plain.operations.items() if cast.operations[key].device != use.device}
    assert differing == {"attn.c_attn.linear", "attn.c_proj.linear", "mlp.c_fc.linear", "mlp.c_proj.linear"}


def test_an_embedding_may_be_held_whole(gpt: ModelGraph, on_two: Placements) -> None:
    table = next(
        (index, ref.node)
        for index, template in enumerate(gpt.templates)
        for node in template.nodes
        if node.op == "aten.embedding.default"
        for ref in node.operands
        if template.by_name[ref.node].kind is Kind.PARAMETER
    )

    def is_split(placements: Placements) -> bool:
        return placements[table[0]][table[1]]["tp"].startswith("S(")

    assert is_split(on_two)
    assert not is_split(placed(gpt, 2, Rules(whole=frozenset({table}))))


def test_messages_that_are_split_already_are_not_scattered(gpt: ModelGraph, on_two: Placements) -> None:
    boundary = next(i for i, unit in enumerate(gpt.units) if unit.fqn.endswith(".1"))
    plain, scattered = (
        evaluator(gpt, stack, tp=2, placements=on_two, pp=2)
        for stack in (EAGER, with_choices(pipeline_messages="scattered"))
    )
    (made,) = stage_values(plain.program, boundary)
    layout = plain.program.templates[gpt.units[made.unit].template].outputs[made.output].layout
    is_split = layout.get("tp", Pair("R")).is_split
    assert (scattered.costs.send_seconds(boundary, 0) == plain.costs.send_seconds(boundary, 0)) is is_split


def test_what_engines_keep_beyond_the_schedule(gpt: ModelGraph) -> None:
    program = evaluator(gpt, EAGER, tp=1, placements=placed(gpt, 1), pp=2).program
    deep, shallow = with_choices(pipeline_buffers="two a stage"), with_choices(pipeline_buffers="outputs of two")
    scheduled = ((Alive(2), Alive(3)),)
    assert microbatches_kept(scheduled, (0, 1), deep, 3) == ((Alive(7), Alive(7)),)
    assert microbatches_kept(scheduled, (0, 2), deep, 3) == ((Alive(7), Alive(3)),)
    assert microbatches_kept(scheduled, (0, 1), shallow, 3) == scheduled
    cost = StageCost(forward=Seconds(), backward=Seconds(), weights=Seconds(), step={}, send_seconds=0.0,
                     memory_bytes={}, num_parameters=0, host_forward=0.0, host_backward=0.0)  # fmt: skip
    priced = PricedStage(cost=cost, still=Memory(parameters=GIB, master_weights=2 * GIB), saved_bytes=0, remade_bytes=0)

    def more(stage: int, stack: Stack, num_stages: int) -> int:
        return buffered(priced, stage, program, stack, num_stages).still.gather_buffers

    assert [more(stage, deep, 3) for stage in range(3)] == [6 * GIB, 6 * GIB, 0]
    logits = 256 * 1024  # of the one sample of a microbatch
    assert [more(stage, shallow, 3) for stage in range(3)] == [0, 0, 4 * logits]
    assert more(0, EAGER, 3) == more(0, deep, 1) == 0
