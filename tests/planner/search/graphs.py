"""Small hand-made graphs for the tests of the search."""

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
)  # fmt: skip


def value(*shape: int, grad: bool = True) -> TensorType:
    return TensorType(shape=shape, requires_grad=grad)


def op(name: str, target: str, args: tuple[object, ...], *outputs: TensorType) -> Node:
    return Node(name=name, kind=Kind.OP, op=target, args=args, outputs=outputs)


def leaf(name: str, kind: Kind, output: TensorType) -> Node:
    return Node(name=name, kind=kind, outputs=(output,))


def residual_mlp(
    *, batch: int = 8, length: int | None = None, width: int = 16, hidden: int = 32, depth: int = 4
) -> ModelGraph:
    """x = x + down(gelu(up(x))), `depth` times, then the sum of squares over the batch; sequences with `length`."""
    samples = (batch,) if length is None else (batch, length)
    features = leaf("features", Kind.INPUT, value(*samples, width, grad=False))
    prelude = Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),))

    def block(name: str, pattern: str, grad: bool) -> Template:
        nodes = (
            leaf("x", Kind.INPUT, value(*samples, width, grad=grad)),
            leaf("up.weight", Kind.PARAMETER, value(hidden, width)),
            leaf("down.weight", Kind.PARAMETER, value(width, hidden)),
            op("up.linear", "aten.linear.default", (Ref("x"), Ref("up.weight")), value(*samples, hidden)),
            op("gelu", "aten.gelu.default", (Ref("up.linear"),), value(*samples, hidden)),
            op("down.linear", "aten.linear.default", (Ref("gelu"), Ref("down.weight")), value(*samples, width)),
            op("add", "aten.add.Tensor", (Ref("x"), Ref("down.linear")), value(*samples, width)),
        )
        return Template(name=name, pattern=pattern, nodes=nodes, outputs=(Ref("add"),), is_module=True)

    head_nodes = (
        leaf("x", Kind.INPUT, value(*samples, width)),
        op("mul", "aten.mul.Tensor", (Ref("x"), Ref("x")), value(*samples, width)),
        op("sum", "aten.sum.default", (Ref("mul"),), value()),
    )
    head = Template(name="Head", pattern="", nodes=head_nodes, outputs=(Ref("sum"),))
    templates = (prelude, block("First", "h.0", False), block("Block", "h.*", True), head)
    units = [Unit(template=0, fqn="", inputs=())]
    tensors: dict[str, ParameterInfo] = {}
    for layer in range(depth):
        held = tuple((f"{part}.weight", f"h.{layer}.{part}.weight") for part in ("up", "down"))
        units.append(
            Unit(template=min(layer, 1) + 1, fqn=f"h.{layer}", inputs=(Value(len(units) - 1, 0),), tensors=held)
        )
        for name, fqn in held:
            tensors[fqn] = ParameterInfo(type=templates[2].by_name[name].output)
    units.append(Unit(template=3, fqn="", inputs=(Value(depth, 0),)))
    return ModelGraph(
        name="residual_mlp",
        batch_size=batch,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=templates,
        units=tuple(units),
        loss=Value(depth + 1, 0),
        tensors=tensors,
    )


def chain(depth: int, *, batch: int, width: int, has_gelu: bool = True) -> ModelGraph:
    """Equal blocks, each a product with a gelu behind it if there is one, and a loss."""
    shape = (batch, width)
    features = leaf("features", Kind.INPUT, value(*shape, grad=False))

    def block(name: str, *, grad: bool) -> Template:
        given = leaf("x", Kind.INPUT, value(*shape, grad=grad))
        weight = leaf("weight", Kind.PARAMETER, value(width, width))
        product_ = op("product", "aten.linear.default", (Ref("x"), Ref("weight")), value(*shape))
        gelu = (op("gelu", "aten.gelu.default", (Ref("product"),), value(*shape)),) if has_gelu else ()
        nodes = (given, weight, product_, *gelu)
        return Template(name=name, pattern="h.*", nodes=nodes, outputs=(Ref(nodes[-1].name),), is_module=True)

    loss = (leaf("x", Kind.INPUT, value(*shape)), op("loss", "aten.sum.default", (Ref("x"),), value()))
    templates = (
        Template(name="Prelude", pattern="", nodes=(features,), outputs=(Ref("features"),)),
        block("First", grad=False),
        block("Block", grad=True),
        Template(name="Loss", pattern="", nodes=loss, outputs=(Ref("loss"),)),
    )
    units = [Unit(template=0, fqn="", inputs=())]
    for index in range(depth):
        tensors = (("weight", f"h.{index}.weight"),)
        template = 2 if index else 1
        units.append(Unit(template=template, fqn=f"h.{index}", inputs=(Value(index, 0),), tensors=tensors))
    units.append(Unit(template=3, fqn="", inputs=(Value(depth, 0),)))
    return ModelGraph(
        name="chain",
        batch_size=batch,
        inputs=(ModelInput(name="features", type=features.output, batch_dim=0),),
        templates=templates,
        units=tuple(units),
        loss=Value(depth + 1, 0),
        tensors={f"h.{index}.weight": ParameterInfo(type=value(width, width)) for index in range(depth)},
    )
