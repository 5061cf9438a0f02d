"""Finding, building and feeding what is in a model file."""

import pytest
import torch
from autopar.cost_models.errors import AutoparError
from autopar.planner.capture import capture_model
from autopar.planner.capture.input_spec import parse_input
from autopar.planner.capture.model_file import load_model_file
from autopar.planner.errors import UnsupportedModel
from compare import SAMPLES, capture

BUILD = (
    "def build(width: int = 4, bias: bool = True, rate: float | None = None):\n"
    "    return nn.Linear(width, 2, bias=bias)\n"
)
TWO = "class A(nn.Module):\n    pass\nclass B(nn.Module):\n    pass\n"
INPUTS = "def example_inputs(batch_size, width=4):\n    return (torch.randn(batch_size, width),)\n"


def load(path, name=None, arguments=None, inputs=None):
    return load_model_file(path, name, arguments or {}, inputs)


def test_arguments_are_converted(model_file):
    loaded = load(model_file(BUILD + INPUTS), arguments={"width": "6", "bias": "false", "rate": "none"})
    assert loaded.arguments == {"width": 6, "bias": False, "rate": None}
    assert loaded.build().weight.shape == (2, 6)
    (x,), _ = loaded.inputs(3)
    assert x.shape == (3, 6)


def test_the_same_seed_builds_the_same_weights(model_file):
    loaded = load(model_file(BUILD))
    assert torch.equal(loaded.build(seed=3).weight, loaded.build(seed=3).weight)
    assert not torch.equal(loaded.build(seed=3).weight, loaded.build(seed=4).weight)


@pytest.mark.parametrize(
    ("text", "options", "what", "fix"),
    [
        (BUILD, {"arguments": {"wdth": "4"}}, "no argument 'wdth'", "bias, rate, width"),
        (BUILD, {"arguments": {"width": "four"}}, "width=four", "int"),
        ("def build(width):\n    return 1\n", {}, "needs arguments", "--set width="),
        ("x = 1\n", {}, "no model in model.py", "define build()"),
        (TWO, {}, "several models", "model.py:A, model.py:B"),
        (TWO, {"name": "C"}, "has no 'C'", "A, B"),
    ],
)
def test_clear_errors(model_file, text, options, what, fix):
    with pytest.raises(AutoparError) as caught:
        load(model_file(text), **options)
    assert what in caught.value.what
    assert fix in caught.value.fix


def test_missing_file(tmp_path):
    with pytest.raises(AutoparError, match="no such model file"):
        load(tmp_path / "nothing.py")


def test_errors_of_the_users_code_name_its_line(model_file):
    loaded = load(model_file("def build():\n    return nn.Linear(4, 'x')\n"))
    with pytest.raises(AutoparError, match="building build raised") as caught:
        loaded.build()
    assert caught.value.where.startswith("model.py:5 in build")
    with pytest.raises(AutoparError, match="importing broken.py raised NameError") as caught:
        load(model_file("oops\n", name="broken.py"))
    assert caught.value.where.startswith("broken.py:4")


def test_name_in_the_path(model_file):
    assert load(f"{model_file(TWO)}:B").name == "B"


def test_one_class_without_required_arguments(model_file):
    part = "class Part(nn.Module):\n    def __init__(self, d):\n        super().__init__()\n"
    text = part + "class Net(nn.Module):\n    pass\n"
    assert load(model_file(text)).name == "Net"


def test_an_instance_and_inputs_from_the_command_line(model_file):
    path = model_file("model = nn.Linear(4, 2)\ndef loss(out):\n    return out.square().mean()\n")
    graph = capture(path, inputs={"input": "float32[B,4]"}, batch_size=6)
    assert graph.inputs[0].type.shape == (6, 4)
    assert graph.inputs[0].batch_dim == 0


def test_inputs_returned_with_the_module(model_file):
    path = model_file(
        "def build():\n    return nn.Linear(4, 2), (torch.randn(5, 4),)\n"
        "def loss(out):\n    return out.square().mean()\n"
    )
    assert capture(path).batch_size == 5
    with pytest.raises(AutoparError, match="have 5 samples"):
        capture(path, batch_size=6)


def test_the_batch_need_not_be_dim_0(model_file):
    path = model_file(
        "def build():\n    return nn.Linear(4, 2)\ndef loss(out, x, scale):\n    return (out * scale).square().mean()\n"
        "def example_inputs(batch_size=3):\n    return torch.randn(7, batch_size, 4), torch.tensor(2.0)\n"
    )
    graph = capture(path)
    assert [(item.name, item.batch_dim) for item in graph.inputs] == [("input", 1), ("scale", None)]


@pytest.mark.parametrize("text", ["int64[B", "int65[B,2]", "int64[B,x]", "int64"])
def test_bad_input_specifications(text):
    with pytest.raises(AutoparError, match="--input ids="):
        parse_input("ids", text)


def test_input_specification_bounds_the_values():
    tensor = parse_input("ids", "int64[B,100]<7").tensor(3, torch.Generator().manual_seed(0))
    assert tensor.shape == (3, 100)
    assert 4 < int(tensor.max()) < 7


def test_large_models_are_never_built_for_real():
    graph = capture(SAMPLES / "matrix_factorization.py", arguments={"num_users": 10**8}, batch_size=64)
    assert graph.tensors["users.weight"].type.shape == (10**8, 100)


NET = (
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.e = nn.Embedding(20, 4)\n"
    "    def forward(self, ids):\n        return self.e(ids).square().mean()\n"
)
IDS = "torch.randint(20, (batch_size, 6))"
EXAMPLE = "def example_inputs(batch_size=8):\n    return "


@pytest.mark.parametrize(
    ("text", "options", "what"),
    [
        ("import sys\nsys.exit(0)\n", {}, "importing model.py raised SystemExit: 0"),
        ("def build():\n    raise SystemExit\n" + EXAMPLE + IDS, {}, "building build raised SystemExit"),
        (NET + "example_inputs = 5\n", {}, "example_inputs in model.py is int, not a function"),
        (NET + EXAMPLE + f"({IDS},)\nloss = 'mse'\n", {}, "loss in model.py is str, not a function"),
        (NET + EXAMPLE + f"({IDS}, {IDS})\n", {}, "example_inputs gives 2 inputs, but only 1 are used"),
        (NET + EXAMPLE + "{'idz': torch.zeros(batch_size)}\n", {}, "no argument 'idz' (example_inputs)"),
        (NET + EXAMPLE + "()\n", {}, "the inputs do not fit forward: missing a required argument: 'ids'"),
        (
            NET + EXAMPLE + "(torch.randint(20, (5, 6)),)\n",
            {},
            "example_inputs(8) and example_inputs(16) give no input",
        ),
        (NET + EXAMPLE + "(torch.zeros([2] * batch_size),)\n", {}, "give other inputs"),
        (NET + EXAMPLE + "(torch.zeros(batch_size + 1),)\n", {}, "give no input that many samples"),
        (NET, {"inputs": {"ids": "int64[B,6]<0"}}, "no value lies below 0"),
        (NET, {"inputs": {"ids": "int64[4,6]"}, "batch_size": 8}, "batch size 8 asked for"),
        (
            "model = Net()\n".join((NET, "")),
            {"inputs": {"ids": "int64[B,99999999999999]"}},
            "cannot make the input ids of shape [8, 99999999999999]",
        ),
    ],
)
def test_inputs_that_do_not_fit(model_file, text, options, what):
    with pytest.raises(AutoparError) as caught:
        capture(model_file(text), **options)
    assert what in caught.value.what
    assert caught.value.fix or caught.value.where


STATEFUL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l, self.drop = nn.Linear(4, 8), nn.Dropout(0.5)
        self.eval()
    def forward(self, x):
        x.mul_(2)
        return self.drop(self.l(x)).square().mean()
def example_inputs(batch_size=8):
    return (torch.randn(batch_size, 4),)
"""


def test_a_step_is_one_of_training_and_may_write_to_its_inputs(model_file):
    graph = capture_model(model_file(STATEFUL)).graph
    assert not graph.notes
    assert graph.is_random


def test_a_step_that_raises_is_refused(model_file):
    path = model_file(NET)
    assert capture_model(path, inputs={"ids": "int64[B,6]<20"}).graph.notes == ()
    with pytest.raises(UnsupportedModel, match="one eager step of the model raised IndexError"):
        capture_model(path, inputs={"ids": "int64[B,6]<2000"})
