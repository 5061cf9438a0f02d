"""Collectives of a step, counted by hand for a small column/row-parallel network with a tied head."""

from collections import Counter

import pytest
from autopar.planner.capture.graph import (
    Kind,
    ModelGraph,
    ModelInput,
    Node,
    ParameterInfo,
    Ref,
    Template,
    TensorType,
    Unit,
    Value,
)
from autopar.planner.search.fsdp_collectives import gathers_waited_for
from autopar.planner.search.held_parameters import (
    HeldParameter,
    held_parameters,
    held_shape,
    padded_bytes,
    shard_bytes,
)
from autopar.planner.search.holdings import Holdings, stage_holdings
from autopar.planner.search.step_collectives import expected_collectives
from autopar.planner.search.unit_kinds import UnitKinds
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.placement import REPLICATED, split
from autopar.planner.sharding.program import model_program

BATCH, WIDTH, HIDDEN, BLOCKS = 8, 6, 16, 3
FLOAT = 4


def tensor(*shape, grad=True):
    return TensorType(shape=shape, requires_grad=grad)


def node(name, op, shape, *args):
    return Node(name=name, kind=Kind.OP, outputs=(tensor(*shape),), op=op, args=args)


def parameter(name, *shape):
    return Node(name=name, kind=Kind.PARAMETER, outputs=(tensor(*shape),))


def value(name, *shape, grad=True):
    return Node(name=name, kind=Kind.INPUT, outputs=(tensor(*shape, grad=grad),))


def graph():
    """x -> linear (tied weight) -> 3 blocks of linear, relu, linear, add -> linear (tied weight) -> sum."""
    prelude = Template(name="Prelude", pattern="", nodes=(value("x", BATCH, WIDTH, grad=False),), outputs=(Ref("x"),))
    first = Template(
        name="Inlet",
        pattern="inlet",
        nodes=(
            value("x", BATCH, WIDTH, grad=False),
            parameter("weight", WIDTH, WIDTH),
            node("linear", "aten.linear.default", (BATCH, WIDTH), Ref("x"), Ref("weight")),
        ),
        outputs=(Ref("linear"),),
    )
    block = Template(
        name="Block",
        pattern="h.*",
        is_module=True,
        nodes=(
            value("x", BATCH, WIDTH),
            parameter("up", HIDDEN, WIDTH),
            parameter("down", WIDTH, HIDDEN),
            node("up.linear", "aten.linear.default", (BATCH, HIDDEN), Ref("x"), Ref("up")),
            node("relu", "aten.relu.default", (BATCH, HIDDEN), Ref("up.linear")),
            node("down.linear", "aten.linear.default", (BATCH, WIDTH), Ref("relu"), Ref("down")),
            node("add", "aten.add.Tensor", (BATCH, WIDTH), Ref("x"), Ref("down.linear")),
        ),
        outputs=(Ref("add"),),
    )
    head = Template(
        name="Head",
        pattern="head",
        nodes=(
            value("x", BATCH, WIDTH),
            parameter("weight", WIDTH, WIDTH),
            node("linear", "aten.linear.default", (BATCH, WIDTH), Ref("x"), Ref("weight")),
            node("sum", "aten.sum.default", (), Ref("linear")),
        ),
        outputs=(Ref("sum"),),
    )
    units = [Unit(template=0, fqn="", inputs=())]
    units.append(Unit(template=1, fqn="inlet", inputs=(Value(0, 0),), tensors=(("weight", "inlet.weight"),)))
    for i in range(BLOCKS):
        tensors = (("up", f"h.{i}.up"), ("down", f"h.{i}.down"))
        units.append(Unit(template=2, fqn=f"h.{i}", inputs=(Value(1 + i, 0),), tensors=tensors))
    units.append(Unit(template=3, fqn="head", inputs=(Value(1 + BLOCKS, 0),), tensors=(("weight", "inlet.weight"),)))
    shapes = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    tensors = {"inlet.weight": ParameterInfo(type=tensor(WIDTH, WIDTH), aliases=("head.weight",))}
    for i in range(BLOCKS):
        tensors |= {f"h.{i}.{name}": ParameterInfo(type=tensor(*shape)) for name, shape in shapes.items()}
    return ModelGraph(
        name="tied",
        batch_size=BATCH,
        inputs=(ModelInput(name="x", type=tensor(BATCH, WIDTH, grad=False), batch_dim=0),),
        templates=(prelude, first, block, head),
        units=tuple(units),
        loss=Value(len(units) - 1, 0),
        tensors=tensors,
    )


def program(mesh):
    """Column and row parallel on tp, batch on dp and over microbatches."""
    batch = {name: "d0" for name, size in (("dp", mesh.dp), ("microbatch", mesh.microbatches)) if size > 1}
    whole = {name: "R/P" for name in batch}
    stream = {name: "S(0)" for name in batch}
    loss_pair = {name: "d0" for name in batch}

    def on_tp(label):
        return {"tp": label} if mesh.tp > 1 else {}

    inlet = {"x": stream, "weight": {**whole}, "linear": {**batch}}
    block = {
        "x": stream,
        "up": {**whole, **on_tp("S(0)")},
        "down": {**whole, **on_tp("S(1)")},
        "up.linear": {**batch, **on_tp("n")},
        "relu": {**batch, **on_tp("d1")},
        "down.linear": {**batch, **on_tp("k")},
        "add": {**batch},
    }
    head = {"x": stream, "weight": {**whole}, "linear": {**batch}, "sum": loss_pair}
    prelude = {"x": {"dp": "S(0)"} if mesh.dp > 1 else {}}
    return model_program(graph(), (prelude, inlet, block, head), mesh)


def lines(mesh, stages=((1, BLOCKS + 3),), *, zero=0, schedule="none", checkpoint="none", state_rank=0):
    """stage -> (axis, op, bytes, reason) -> count."""
    found = {stage: Counter() for stage in range(len(stages))}
    for line in expected_collectives(
        program(mesh), stages, zero=zero, schedule=schedule, activation_checkpoint=checkpoint, state_rank=state_rank
    ):
        key = line.axis, line.op, line.num_bytes, line.reason
        assert key not in found[line.stage], "lines are summed up"
        found[line.stage][key] = line.count
    return found


def test_one_rank_communicates_nothing():
    assert lines(Mesh()) == {0: Counter()}


def test_tensor_parallel_reduces_once_forward_and_once_backward():
    stream = BATCH * WIDTH * FLOAT
    assert lines(Mesh(tp=2))[0] == {
        ("tp", "all_reduce", stream, "forward"): BLOCKS,
        ("tp", "all_reduce", stream, "backward"): BLOCKS,
        ("world", "all_reduce", FLOAT, "clip"): 1,
    }


def test_microbatches_run_smaller_collectives_more_often():
    stream = BATCH // 4 * WIDTH * FLOAT
    found = lines(Mesh(tp=2, microbatches=4))[0]
    assert found["tp", "all_reduce", stream, "forward"] == 4 * BLOCKS
    assert found["tp", "all_reduce", stream, "backward"] == 4 * BLOCKS


def test_recomputation_stops_at_the_last_saved_tensor():
    # The reduction after the second product saves nothing, and nothing behind it does: it is not repeated.
    plain, recomputed = lines(Mesh(tp=2))[0], lines(Mesh(tp=2), checkpoint="full")[0]
    assert recomputed == plain


def test_replicated_data_parallel_reduces_one_bucket():
    total = (WIDTH * WIDTH + BLOCKS * 2 * WIDTH * HIDDEN) * FLOAT
    assert lines(Mesh(dp=2))[0] == {
        ("dp", "all_reduce", total, "partial gradients"): 1,
        ("dp", "all_reduce", FLOAT, "loss"): 1,
        ("world", "all_reduce", FLOAT, "clip"): 1,
    }


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 3)])
def test_sharded_data_parallel_gathers_padded_blocks(zero, gathers):
    # dim 0 of every weight is padded to a multiple of 4 ranks: 6 -> 8 rows.
    root = 8 * WIDTH * FLOAT
    block = (HIDDEN * WIDTH + 8 * HIDDEN) * FLOAT
    found = lines(Mesh(dp=4, microbatches=2), zero=zero)[0]
    assert found["dp", "all_gather", root, "fsdp"] == 1  # kept from its forward on: its backward comes first
    assert found["dp", "all_gather", block, "fsdp"] == gathers * BLOCKS
    assert found["dp", "reduce_scatter", root, "fsdp"] == 1
    assert found["dp", "reduce_scatter", block, "fsdp"] == BLOCKS


@pytest.mark.parametrize(("schedule", "per_rank"), [("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble-v", 2)])
@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 5)])
def test_a_split_backward_gathers_as_often_as_a_whole_one(schedule, per_rank, zero, gathers):
    ends = (2, 3, 4) if per_rank == 2 else (3,)
    stages = tuple(zip((1, *ends), (*ends, BLOCKS + 3), strict=True))
    found = lines(Mesh(pp=2, dp=2, microbatches=4), stages, zero=zero, schedule=schedule)
    block = (HIDDEN * WIDTH + 6 * HIDDEN) * FLOAT
    assert sum(rank["dp", "all_gather", block, "fsdp"] for rank in found.values()) == gathers * BLOCKS
    waited = [gathers_waited_for(schedule, 2, 4, per_rank, stage) for stage in range(len(stages))]
    assert waited[0] == 0  # all of its backward is W, which gathers block by block
    assert all(0 < count < gathers for count in waited[1:]) or zero == 2


def test_shards_within_groups_are_summed_over_the_groups():
    found = lines(Mesh(dp=4, microbatches=2, replicas=2), zero=3)[0]
    block = (HIDDEN * WIDTH + 6 * HIDDEN) * FLOAT  # two ranks divide all of it
    assert found["dp_shard", "all_gather", block, "fsdp"] == 3 * BLOCKS
    assert found["dp_shard", "reduce_scatter", block, "fsdp"] == BLOCKS
    assert found["dp_replicate", "all_reduce", block // 2, "fsdp"] == BLOCKS
    assert not any(axis == "dp" and reason == "fsdp" for axis, _, _, reason in found)


@pytest.mark.parametrize("zero", [1, 3])
def test_zero_splits_states_over_dp_and_cp_together(zero):
    """Nothing is left to add up over cp alone, and as much is exchanged as over that many ranks of dp."""
    together, alone = lines(Mesh(dp=2, cp=2), zero=zero)[0], lines(Mesh(dp=4), zero=zero)[0]
    reason = "fsdp" if zero == 3 else "zero1"
    exchanged = {key: count for key, count in together.items() if key[3] == reason}
    assert exchanged == {("dp_cp", *key[1:]): count for key, count in alone.items() if key[3] == reason}
    assert not any(reason == "partial gradients" for _, _, _, reason in together)
    only_cp = lines(Mesh(cp=4), zero=zero)[0]
    assert {("cp", *key[1:]): count for key, count in exchanged.items()}.items() <= only_cp.items()


def test_groups_of_shards_hold_all_of_cp():
    found = lines(Mesh(dp=4, cp=2, replicas=2), zero=3)[0]
    block = (HIDDEN * WIDTH + 8 * HIDDEN) * FLOAT  # over four ranks
    assert found["dp_shard", "all_gather", block, "fsdp"] == 2 * BLOCKS
    assert found["dp_replicate", "all_reduce", block // 4, "fsdp"] == BLOCKS


def test_zero_1_exchanges_blocks_once_a_step_along_dims_that_tp_leaves_whole():
    found = lines(Mesh(dp=4, tp=2, microbatches=2), zero=1)[0]
    root = 8 * WIDTH * FLOAT  # 6 rows, padded
    block = (HIDDEN // 2 * 8 + 8 * HIDDEN // 2) * FLOAT  # up: its columns, for tp has the rows; down: its rows
    for op in ("all_gather", "reduce_scatter"):
        assert found["dp", op, root, "zero1"] == 1
        assert found["dp", op, block, "zero1"] == BLOCKS
    assert not any(reason in ("fsdp", "partial gradients") for _, _, _, reason in found)


def test_zero_1_leaves_whole_what_has_no_dim_to_split():
    bias = HeldParameter(
        fqn="b", shape=(6,), dtype="float32", trainable=True, partial=frozenset(), group="", split_dims=frozenset({0})
    )
    assert bias.dp_dim(1) is None
    assert padded_bytes(bias, 4, zero=1) == 4 * 6 * FLOAT  # every rank's part of the buffer is all of it
    assert shard_bytes(bias, 4, 3, zero=1) == 6 * FLOAT


def test_stages_exchange_each_microbatch_and_sum_tied_gradients():
    m = 4
    message = BATCH // m // 2 * WIDTH * FLOAT
    found = lines(Mesh(pp=2, dp=2, microbatches=m), ((1, 3), (3, BLOCKS + 3)), schedule="1f1b")
    for stage in (0, 1):
        assert found[stage]["pp", "send", message, "stage"] == m
        assert found[stage]["pp", "recv", message, "stage"] == m
        assert found[stage]["tied", "all_reduce", WIDTH * WIDTH * FLOAT, "tied"] == 1


def test_a_value_is_passed_through_the_stages_between():
    # Four stages: the middle ones receive and send one activation and one gradient.
    stages = ((1, 2), (2, 3), (3, 4), (4, BLOCKS + 3))
    found = lines(Mesh(pp=4), stages, schedule="gpipe")
    message = BATCH * WIDTH * FLOAT
    for stage, count in ((0, 1), (1, 2), (2, 2), (3, 1)):
        assert found[stage]["pp", "send", message, "stage"] == count
        assert found[stage]["pp", "recv", message, "stage"] == count


def test_parameters_of_a_stage():
    held = {parameter.fqn: parameter for parameter in held_parameters(program(Mesh(dp=2, tp=2)), 3, 5)}
    assert list(held) == ["h.1.up", "h.1.down", "h.2.up", "h.2.down"]
    assert held["h.1.up"].shape == (HIDDEN // 2, WIDTH)
    assert held["h.1.down"].shape == (WIDTH, HIDDEN // 2)
    assert held["h.2.up"].group == "h.2"
    assert held["h.1.up"].partial == frozenset({"dp"})


@pytest.mark.parametrize("mesh", [Mesh(dp=2, tp=2), Mesh(dp=4, microbatches=2)])
def test_stages_are_folded_as_if_every_parameter_were_looked_at(mesh):
    lowered = program(mesh)
    last = len(lowered.graph.units)
    sharing = UnitKinds(lowered.graph).sharing
    assert sharing  # the tied parameters
    for first, end in ((0, last), (0, 3), (1, 4), (2, last), (3, 5), (last - 1, last)):
        folded = stage_holdings(lowered, first, end, sharing)
        one_by_one = Holdings.of(held_parameters(lowered, first, end))
        assert Counter(dict(folded.parameters)) == Counter(dict(one_by_one.parameters))
        assert folded.num_groups == one_by_one.num_groups
        for dp, zero in ((1, 2), (2, 2), (3, 1)):
            for trained in (False, True):
                sizes = [Counter[int]() for _ in range(2)]
                for counted, held in zip(sizes, (folded, one_by_one), strict=True):
                    for size, count in held.group_bytes(dp, zero, trained=trained):
                        counted[size] += count
                assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("layout", "sizes", "shape"),
    [
        ({"tp": REPLICATED}, {"tp": 4}, (12, 5)),
        ({"tp": split(0)}, {"tp": 4}, (3, 5)),
        ({"tp": split(0, 3)}, {"tp": 2}, (3, 2, 5)),
        ({"tp": split(1)}, {"tp": 5}, (12, 1)),
        ({"ep": split(0), "tp": split(1)}, {"ep": 4, "tp": 5}, (3, 1)),
        ({"ep": split(0), "tp": split(0)}, {"ep": 2, "tp": 3}, (2, 5)),
        ({"ep": split(1), "tp": split(0, 3)}, {"ep": 5, "tp": 2}, (3, 2, 1)),
    ],
)
def test_held_shape(layout, sizes, shape):
    assert held_shape(tensor(12, 5), layout, Mesh(**sizes)) == shape


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_shards_add_up_and_fit_the_padding(rows, dp):
    held = HeldParameter(fqn="w", shape=(rows, 5), dtype="float32", trainable=True, partial=frozenset(), group="")
    shards = [shard_bytes(held, dp, rank) for rank in range(dp)]
    assert sum(shards) == rows * 5 * FLOAT
    assert shards[0] * dp == padded_bytes(held, dp)
    assert shards == sorted(shards, reverse=True)


@pytest.mark.parametrize("reads", [("neg",), ("neg", "x")])
def test_the_prelude_and_who_reads_it_share_a_conversion(reads):
    """`x` is gathered for the `neg` of the prelude, and once, though a unit reads it gathered too."""
    flat = tensor(BATCH, WIDTH, grad=False)
    prelude = Template(
        name="Prelude", pattern="", outputs=tuple(map(Ref, reads)),
        nodes=(
            Node(name="x", kind=Kind.INPUT, outputs=(flat,)),
            Node(name="neg", kind=Kind.OP, op="aten.neg.default", args=(Ref("x"),), outputs=(flat,)),
        ),
    )  # fmt: skip
    added = Node(name="add", kind=Kind.OP, op="aten.add.Tensor", args=(Ref(reads[0]), Ref(reads[-1])), outputs=(flat,))
    block = Template(
        name="Block", pattern="block", outputs=(Ref("add"),),
        nodes=(*(Node(name=name, kind=Kind.INPUT, outputs=(flat,)) for name in reads), added),
    )  # fmt: skip
    read = ModelGraph(
        name="m", batch_size=BATCH, inputs=(ModelInput(name="x", type=flat, batch_dim=0),), templates=(prelude, block),
        units=(
            Unit(template=0, fqn="", inputs=()),
            Unit(template=1, fqn="block", inputs=tuple(Value(0, i) for i in range(len(reads)))),
        ),
        loss=Value(1, 0), tensors={},
    )  # fmt: skip
    found = expected_collectives(
        model_program(read, ({"x": {"tp": "S(1)"}}, {}), Mesh(tp=2)), ((1, 2),), zero=0, schedule="none",
        activation_checkpoint="none",
    )  # fmt: skip
    assert [line.count for line in found if line.op == "all_gather"] == [1]
