"""What cannot be captured is refused with the user's line and a way out."""

import pytest
from autopar.planner.capture import capture_model, step_graph
from autopar.planner.errors import UnsupportedModel
from compare import CASES, capture

INPUTS = "\ndef example_inputs(batch_size=4):\n    return (torch.randn(batch_size, 8),)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("control_flow_on_values", "control_flow_on_values.py:18"),
        ("moe_boolean_mask", "moe_boolean_mask.py:25"),
        ("batchnorm_cumulative", "batchnorm_cumulative.py:18"),
    ],
)
def test_reading_values_names_the_line(name, where):
    with pytest.raises(UnsupportedModel, match="reads a tensor's value") as caught:
        capture(CASES / "reports" / f"{name}.py")
    assert caught.value.where.startswith(where)
    assert caught.value.fix


def test_reading_values_in_a_library_names_its_line_too(model_file):
    path = model_file(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.bn = nn.BatchNorm1d(8, momentum=None)\n"
        "    def forward(self, x):\n        return self.bn(x).square().mean()\n" + INPUTS
    )
    with pytest.raises(UnsupportedModel, match=r"batchnorm.py:\d+ in forward: .*num_batches_tracked") as caught:
        capture(path)
    assert "self.bn(x)" in caught.value.where


def test_custom_autograd_function(model_file):
    path = model_file(
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n    def forward(ctx, x):\n        return 2 * x\n"
        "    @staticmethod\n    def backward(ctx, g):\n        return 3 * g\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return Double.apply(self.l(x)).square().mean()\n" + INPUTS
    )
    with pytest.raises(UnsupportedModel, match="custom autograd function Double") as caught:
        capture(path)
    assert "return Double.apply" in caught.value.where


def test_reentrant_checkpoint(model_file):
    path = model_file(
        "from torch.utils.checkpoint import checkpoint\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        return checkpoint(self.l, x, use_reentrant=True).square().mean()\n" + INPUTS
    )
    with pytest.raises(UnsupportedModel, match="reentrant activation checkpointing"):
        capture(path)


def test_no_scalar_loss(model_file):
    path = model_file("def build():\n    return nn.Linear(8, 8)\n" + INPUTS)
    with pytest.raises(UnsupportedModel, match="no scalar loss") as caught:
        capture(path)
    assert "loss(output, *inputs)" in caught.value.fix


def test_nothing_trained(model_file):
    path = model_file(
        "def build():\n    return nn.Linear(8, 8).requires_grad_(False)\n"
        "def loss(out):\n    return out.sum()\n" + INPUTS
    )
    with pytest.raises(UnsupportedModel, match="no parameter that requires a gradient"):
        capture(path)


def test_guard_sees_what_the_capture_cannot(model_file):
    """State outside of the module: the graph holds the value of the first step."""
    path = model_file(
        "STEPS = [0]\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
        "    def forward(self, x):\n        STEPS[0] += 1\n        return self.l(x).square().mean() * STEPS[0]\n"
        + INPUTS
    )
    with pytest.raises(UnsupportedModel, match="differs from one eager step"):
        capture_model(path)


def test_guard_sees_what_a_step_leaves_behind(model_file):
    """State of the module that is no buffer: the first step alone agrees, for each capture builds the module anew."""
    path = model_file(
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
        "        self.steps = 0\n"
        "    def forward(self, x):\n        self.steps += 1\n        return self.l(x).square().mean() * self.steps\n"
        + INPUTS
    )
    with pytest.raises(UnsupportedModel, match="loss of a second step"):
        capture_model(path)


def test_guard_agrees(model_file):
    path = model_file(
        "def build():\n    return nn.Linear(8, 8)\ndef loss(out):\n    return out.square().mean()\n" + INPUTS
    )
    assert capture_model(path).graph.notes == ()


ENDLESS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
    def again(self, x):
        return self.again(self.l(x))
    def forward(self, x):
        return self.again(x).square().mean()
"""


@pytest.mark.parametrize(
    ("through", "where"),
    [
        ("return self.again(self.l(x))", " in again: return self.again(self.l(x))"),
        ("return self(self.l(x))", " in forward: return self.again(x).square().mean()"),
    ],
)
def test_a_model_that_calls_itself_without_end_is_refused_at_once(model_file, monkeypatch, through, where):
    monkeypatch.setattr(step_graph, "exported_graph", lambda what: pytest.fail("torch.export is tried"))
    with pytest.raises(UnsupportedModel, match="calls itself without end, or deeper than the 1000 calls") as caught:
        capture(model_file(ENDLESS.replace("return self.again(self.l(x))", through) + INPUTS))
    assert caught.value.where.endswith(where)


def test_a_deep_model_is_captured(model_file):
    """One container in another, almost as deep as Python calls."""
    deep = "        for _ in range(150):\n            self.l = nn.Sequential(self.l)\n"
    text = ENDLESS.replace("self.again(self.l(x))", "self.l(x)").replace("    def again", f"{deep}    def again")
    assert capture(model_file(text + INPUTS)).notes == ()


@pytest.mark.parametrize("place", ["forward", "loss"])
def test_a_model_that_ends_the_program_is_refused(model_file, place):
    """It would pass for an exit code of autopar's."""
    stop = "        raise SystemExit(3)\n"
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
    )
    net += "    def forward(self, x):\n" + (stop if place == "forward" else "        return self.l(x)\n")
    if place == "loss":
        net += "def loss(y, x):\n" + stop[4:]
    with pytest.raises(UnsupportedModel, match=r"ends the program: SystemExit\(3\)") as caught:
        capture(model_file(net + INPUTS))
    assert f" in {place}: raise SystemExit(3)" in caught.value.where


@pytest.mark.parametrize(
    ("error", "says"), [("KeyboardInterrupt", "raised K"), ("SystemExit(0)", "fails: the model e")]
)
def test_a_model_that_ends_in_its_eager_step_is_refused(model_file, error, says):
    net = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.l = nn.Linear(8, 8)\n"
    )
    net += f"    def forward(self, x):\n        if not x.is_meta:\n            raise {error}\n"
    net += "        return self.l(x).sum()\n"
    with pytest.raises(UnsupportedModel, match=f"one eager step of the model {says}"):
        capture_model(model_file(net + INPUTS))
