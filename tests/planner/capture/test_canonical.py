"""Canonical form: docs/design.md says what it is."""

import pytest
from autopar.planner.capture.graph import Kind, Symbol
from autopar.planner.errors import UnsupportedModel
from compare import assert_equal, capture, outcome

INPUTS = "\ndef example_inputs(batch_size=4):\n    return (torch.randn(batch_size, 8, 12),)\n"


def net(forward, init="self.l = nn.Linear(12, 12)"):
    return (
        f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        {init}\n"
        f"    def forward(self, x):\n        {forward}\n" + INPUTS
    )


def operations(graph):
    return [(n.op, n.args) for t in graph.templates for n in t.of_kind(Kind.OP)]


def test_one_spelling(model_file):
    path = model_file(
        net(
            "x = self.l(x); a, b = x.chunk(2, dim=-1); y = (a * b).flatten(-2).unflatten(-1, (8, 6)).contiguous(); "
            "return y.clone().to(y.dtype).transpose(-1, -2).softmax(-1).square().mean()"
        )
    )
    found = operations(capture(path))
    names = [op for op, _ in found]
    assert names == [
        "aten.linear.default", "aten.add.Tensor", "aten.split_with_sizes.default", "aten.mul.Tensor",
        "aten.reshape.default", "aten.reshape.default", "aten.transpose.int", "aten.softmax.int", "aten.square.default",
        "aten.mean.default",
    ]  # fmt: skip
    split = dict(found)["aten.split_with_sizes.default"]
    assert split[1:] == ((6, 6), 2)
    assert found[5][1][1] == (4, 8, 6)
    assert found[6][1][1:] == (1, 2)
    assert_equal(outcome(path))


def test_convolution_bias_is_added_after(model_file):
    path = model_file(net("return self.c(x).square().mean()", init="self.c = nn.Conv1d(8, 4, 3)"))
    assert [op for op, _ in operations(capture(path))][:3] == [
        "aten.conv1d.default", "aten.reshape.default", "aten.add.Tensor",
    ]  # fmt: skip
    assert_equal(outcome(path))


def test_cross_entropy_divides_by_the_count(model_file):
    path = model_file(
        "def build():\n    return nn.Linear(12, 5)\n"
        "def loss(out, x, y):\n    return F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)\n"
        "def example_inputs(batch_size=4):\n    y = torch.randint(5, (batch_size, 8))\n    y[:, :3] = -100\n"
        "    return torch.randn(batch_size, 8, 12), y\n"
    )
    graph = capture(path)
    assert {"aten.ne.Scalar", "aten.sum.default"} <= {n.op for n in graph.templates[0].nodes}
    loss = graph.templates[-1].nodes[-1]
    assert loss.op == "aten.div.Tensor"
    assert_equal(outcome(path))


@pytest.mark.parametrize(
    "body",
    [
        "y = self.l(x); y += 1; y.relu_(); return y.square().mean()",
        "y = self.l(x); y[:, 1] = 0.0; y[0].add_(1); y[..., 2:5] *= 2; return y.square().mean()",
        "y = self.l(x); z = y.view(-1, 6); y.mul_(2); return (z * z).mean() + y.mean()",
        "y = self.l(x); y.transpose(0, 1)[3].zero_(); w = y.clone(); w.add_(1); return (y * y * w.mean()).mean()",
        "y = self.l(x); a, b = y[..., :6], y[..., 6:]; a.fill_(2.0); b.mul_(3); return y.square().mean()",
        # Autograd has no derivative of slice_scatter and select_scatter of complex numbers.
        "y = torch.fft.rfft(self.l(x)); y[..., 2:4] *= 2; y[:, 1] = 1j; return y.abs().square().mean()",
        "y = self.l(x).masked_fill_(x > 0, 0.5); y[None].permute(2, 0, 1, 3)[1].mul_(3); return y.square().mean()",
    ],
)
def test_in_place_operations_become_functional(model_file, body):
    path = model_file(net(body))
    graph = capture(path)
    assert not [op for op, _ in operations(graph) if op.split(".")[1].endswith("_")]
    assert_equal(outcome(path))


def test_no_grad_regions_detach(model_file):
    path = model_file(
        net(
            "y = self.l(x)\n        with torch.no_grad():\n            s = y.abs().amax()\n"
            "        return (y / s).square().mean()"
        )
    )
    assert "aten.detach.default" in [op for op, _ in operations(capture(path))]
    assert_equal(outcome(path))


def test_gradients_flow_where_some_reader_sends_one(model_file):
    """The distances are read by `argmin` alone, and the input of the second unit by `detach`."""
    body = "y = self.l(x); far = torch.cdist(y[0], y[1]).argmin(-1); return (y[0, far] * self.m(y[1].detach())).mean()"
    graph = capture(model_file(net(body, init="self.l = nn.Linear(12, 12); self.m = nn.Linear(12, 12)")))
    flows = {n.op: n.outputs[0].requires_grad for t in graph.templates for n in t.of_kind(Kind.OP)}
    assert not flows["aten.cdist.default"]
    assert flows["aten.linear.default"]


@pytest.mark.parametrize(
    ("body", "operation"),
    [
        ("return F.dropout(self.l(x), 0.1, True, inplace=True).square().mean()", "aten.dropout.default"),
        ("return F.alpha_dropout(self.l(x), 0.1, True, inplace=True).square().mean()", "aten.alpha_dropout.default"),
        ("return self.l(x).square().add_(1).polygamma_(1).mean()", "aten.polygamma.default"),
    ],
)
def test_operations_in_place_may_name_their_arguments_otherwise(model_file, body, operation):
    """`dropout_` writes `self`, `dropout` reads `input`; `polygamma` has its two the other way round."""
    nodes = [node for template in capture(model_file(net(body))).templates for node in template.of_kind(Kind.OP)]
    (node,) = [node for node in nodes if node.op == operation]
    assert len(node.operands) == 1


def test_results_in_place_may_have_another_shape(model_file):
    graph = capture(model_file(net("y = self.l(x); y.unsqueeze_(1); return (y * self.l(x)).mean()")))
    shapes = {n.op: n.output.shape for t in graph.templates for n in t.of_kind(Kind.OP)}
    assert shapes["aten.unsqueeze.default"] == (4, 1, 8, 12)


def test_out_arguments_are_results(model_file):
    body = "with torch.no_grad(): torch.mul(x, 2, out=self.b)\n        return (self.l(x) * self.b).square().mean()"
    path = model_file(net(body, init="self.l = nn.Linear(12, 12); self.register_buffer('b', torch.zeros(4, 8, 12))"))
    assert "aten.mul.Tensor" in [op for op, _ in operations(capture(path))]
    assert_equal(outcome(path))


def test_training_is_a_symbol(model_file):
    path = model_file(net("return F.dropout(self.l(x), 0.25, self.training).square().mean()"))
    graph = capture(path)
    assert graph.is_random
    assert dict(operations(graph))["aten.dropout.default"][1:] == (0.25, Symbol("training", ""))
    assert_equal(outcome(path))


def test_other_code_in_eval_is_noted(model_file):
    path = model_file(net("y = self.l(x); y = y if self.training else y * 2; return y.square().mean()"))
    (note,) = capture(path).notes
    assert note.startswith("eval mode runs other operations than training")


def test_buffer_updates(model_file):
    path = model_file(
        net(
            "y = self.l(x); self.mean.mul_(0.9).add_(0.1 * y.detach().mean()); return (y - self.mean).square().mean()",
            init='self.l = nn.Linear(12, 12); self.register_buffer("mean", torch.zeros(()))',
        )
    )
    graph = capture(path)
    assert [name for t in graph.templates for name, _ in t.buffer_updates] == ["mean"]
    result = outcome(path)
    assert_equal_training(result)


def assert_equal_training(result):
    assert abs(result.loss - result.wanted_loss) < 1e-12
    assert result.buffer_errors["mean"] < 1e-12
    assert max(result.gradient_errors.values()) < 1e-9


def test_what_follows_from_constants_alone_may_be_read(model_file):
    """As `nn.Transformer` compares its mask with a causal one."""
    body = (
        "mask = torch.ones(8, 8).triu(1)\n        y = self.l(x)\n"
        "        return y.square().mean() if bool((mask == torch.ones(8, 8).triu(1)).all()) else y.mean()"
    )
    path = model_file(net(body))
    assert "aten.square.default" in [op for op, _ in operations(capture(path))]
    assert_equal(outcome(path))


@pytest.mark.parametrize(
    "mask", ["x[0] > 0", "self.l.weight > 0", "torch.rand(8, 8) > 0.5", "torch.zeros(8, 8); mask.diagonal().add_(1)"]
)
def test_what_others_decide_is_not_read(model_file, mask):
    body = f"mask = {mask}\n        return self.l(x).mean() * (2 if bool((mask > 0).any()) else 1)"
    with pytest.raises(UnsupportedModel, match="reads a tensor's value"):
        capture(model_file(net(body)))
