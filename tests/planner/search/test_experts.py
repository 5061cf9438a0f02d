"""Experts are found by their factors: in batched products of stacked parameters, and from there along the graph."""

from autopar.planner.capture.graph import Kind, ModelGraph, ModelInput, ParameterInfo, Ref, Template, Unit, Value
from autopar.planner.search.space import Rules, Space, operation_options, tensor_pairs
from autopar.planner.sharding.mesh import Axis
from autopar.planner.sharding.placement import SUMMED_GRADIENT, split
from graphs import leaf, op, residual_mlp, value

EXPERTS, TOKENS, WIDTH, HIDDEN = 4, 16, 8, 32


def experts() -> ModelGraph:
    """(tokens, width) -> (experts, tokens / experts, width), one product by an expert each, and back; one bias."""
    each = TOKENS // EXPERTS
    features = leaf("features", Kind.INPUT, value(TOKENS, WIDTH, grad=False))
    nodes = (
        leaf("x", Kind.INPUT, value(TOKENS, WIDTH, grad=False)),
        leaf("stacked", Kind.PARAMETER, value(EXPERTS, HIDDEN, WIDTH)),
        leaf("positions", Kind.PARAMETER, value(1, 1, HIDDEN)),
        op(
            "tokens",
            "aten.reshape.default",
            (Ref("x"), (EXPERTS, each, WIDTH)),
            value(EXPERTS, each, WIDTH, grad=False),
        ),
        op("turned", "aten.transpose.int", (Ref("stacked"), 1, 2), value(EXPERTS, WIDTH, HIDDEN)),
        op("product", "aten.bmm.default", (Ref("tokens"), Ref("turned")), value(EXPERTS, each, HIDDEN)),
        op("gelu", "aten.gelu.default", (Ref("product"),), value(EXPERTS, each, HIDDEN)),
        op("shifted", "aten.add.Tensor", (Ref("gelu"), Ref("positions")), value(EXPERTS, each, HIDDEN)),
        op("back", "aten.reshape.default", (Ref("shifted"), (TOKENS, HIDDEN)), value(TOKENS, HIDDEN)),
        op("loss", "aten.sum.default", (Ref("back"),), value()),
    )
    held = {"stacked": nodes[1].output, "positions": nodes[2].output}
    return ModelGraph(
        name="experts",
        batch_size=TOKENS,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=(
            Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),)),
            Template(name="Model", pattern="", nodes=nodes, outputs=(Ref("loss"),)),
        ),
        units=(
            Unit(template=0, fqn="", inputs=()),
            Unit(template=1, fqn="", inputs=(Value(0, 0),), tensors=tuple((name, name) for name in held)),
        ),
        loss=Value(1, 0),
        tensors={name: ParameterInfo(type=kind) for name, kind in held.items()},
    )


def test_experts_are_followed_from_the_product():
    found = Space(experts()).experts
    assert found.counts == {EXPERTS}
    assert found.tensors == {(1, "stacked"): (split(0),)}
    assert found.labels[1, "product"] == {"d0"}
    assert found.labels[1, "gelu"] == {"d0"}
    assert (1, "x") not in found.labels


def test_an_expert_parameter_is_split_where_it_can_be():
    space = Space(experts())
    node = space.graph.templates[1].by_name["stacked"]
    assert tensor_pairs(space, 1, node, Axis("ep", 2), Rules()) == [split(0)]
    assert tensor_pairs(space, 1, node, Axis("ep", 8), Rules()) == [SUMMED_GRADIENT]
    assert tensor_pairs(space, 1, node, Axis("cp", 2), Rules()) == [SUMMED_GRADIENT]
    positions = space.graph.templates[1].by_name["positions"]
    assert tensor_pairs(space, 1, positions, Axis("ep", 2), Rules()) == [SUMMED_GRADIENT]


def test_products_of_matrices_have_no_experts():
    found = Space(residual_mlp()).experts
    assert not found.counts
    assert not found.labels
    assert not found.tensors


def test_context_parallelism_takes_no_batch_and_leaves_parameters_whole():
    space = Space(residual_mlp())
    template = space.graph.templates[2]
    for name, labels in (("up.linear", {"none", "grad", "partial"}), ("gelu", {"none", "grad", "d0", "d1"})):
        options = operation_options(space, 2, template.by_name[name], Axis("cp", 2), Rules())
        assert {option.label.partition(":")[0] for option in options} <= labels | {"d0", "partial"}
        batch = tuple({node.name: {"microbatch": "d0"} for node in t.nodes} for t in space.graph.templates)
        options = operation_options(space, 2, template.by_name[name], Axis("cp", 2), Rules(batch=batch))
        assert "d0" not in {option.label for option in options}
