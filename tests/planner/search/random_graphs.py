"""Random small model graphs of real operations: chains, shared values, one or two units."""

import random

from autopar.planner.capture.graph import (
    Kind,
    ModelGraph,
    ModelInput,
    Node,
    ParameterInfo,
    Ref,
    Template,
    Unit,
    Value,
)  # fmt: skip
from graphs import leaf, op, value

SIZES = (6, 64, 768, 4096)


def random_graph(seed: int, *, most_nodes: int) -> ModelGraph:
    """2 to `most_nodes` operations, the loss included; two units where a cut is possible and the seed says so."""
    rng = random.Random(seed)
    batch, width = rng.choice((4, 64, 2048)), rng.choice(SIZES)
    shape = (batch, width) if batch > 4 or rng.random() < 0.5 else (batch, rng.choice((3, 512)), width)
    features = leaf("features", Kind.INPUT, value(*shape, grad=False))
    count = rng.randint(2, most_nodes)
    cut = rng.randint(1, count - 1) if count > 2 and rng.random() < 0.5 else 0
    templates = [Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),))]
    units = [Unit(template=0, fqn="", inputs=())]
    tensors: dict[str, ParameterInfo] = {}
    nodes: list[Node] = [leaf("x", Kind.INPUT, value(*shape, grad=False))]
    made = [Ref("x")]
    held: list[tuple[str, str]] = []
    is_trained = False

    def close(output: Ref) -> None:
        template = Template(name=f"Part{len(templates)}", pattern=f"part{len(templates)}", nodes=tuple(nodes),
                            outputs=(output,), is_module=rng.random() < 0.7)  # fmt: skip
        units.append(Unit(template=len(templates), fqn=f"part{len(templates)}", inputs=(Value(len(units) - 1, 0),),
                          tensors=tuple(held)))  # fmt: skip
        templates.append(template)

    for index in range(count - 1):
        last = made[-1]
        kind = next(node for node in nodes if node.name == last.node).output
        draw = rng.random() if is_trained else 0.0
        name = f"op{index}"
        if draw < 0.45:
            hidden = rng.choice(SIZES)
            weight = leaf(f"{name}.weight", Kind.PARAMETER, value(hidden, kind.shape[-1]))
            held.append((weight.name, f"{len(templates)}.{weight.name}"))
            tensors[held[-1][1]] = ParameterInfo(type=weight.output)
            nodes.append(weight)
            nodes.append(op(name, "aten.linear.default", (last, Ref(weight.name)), value(*kind.shape[:-1], hidden)))
            is_trained = True
        elif draw < 0.65:
            nodes.append(op(name, "aten.gelu.default", (last,), value(*kind.shape)))
        else:
            target = rng.choice(("aten.mul.Tensor", "aten.add.Tensor"))
            types = {node.name: node.output for node in nodes}
            others = [ref for ref in made if types[ref.node].shape == kind.shape and types[ref.node].requires_grad]
            nodes.append(op(name, target, (last, rng.choice(others)), value(*kind.shape)))
        made.append(Ref(name))
        if index + 1 == cut:
            close(made[-1])
            nodes, held = [leaf("x", Kind.INPUT, nodes[-1].output)], []
            made = [Ref("x")]
    nodes.append(op("loss", "aten.sum.default", (made[-1],), value()))
    close(Ref("loss"))
    return ModelGraph(
        name=f"random{seed}",
        batch_size=batch,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=tuple(templates),
        units=tuple(units),
        loss=Value(len(units) - 1, 0),
        tensors=tensors,
    )
