"""The sample models train, and their sizes are the published ones."""

import importlib.util
from itertools import islice
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "sample_models"


def load(name):
    spec = importlib.util.spec_from_file_location(f"sample_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "preset", "num_parameters"),
    [
        ("gpt", "124m", 124_475_904),
        ("llama", "1b", 1_235_814_400),
        ("llama", "8b", 8_030_261_248),
        ("llama", "70b", 70_553_706_496),
        ("llama", "405b", 405_853_388_800),
        ("moe", "8x7b", 46_719_569_920),
        ("resnet", "resnet50", 25_557_032),
    ],
)
def test_sizes(name, preset, num_parameters):
    with torch.device("meta"):
        model = load(name).build(preset=preset)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters


def test_gpt_learns():
    gpt = load("gpt")
    torch.manual_seed(0)
    model = gpt.build(num_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for ids, targets in islice(gpt.training_batches(8), 50):
        loss = model(ids, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] - losses[-1] > 1.0


def test_experts_drop_tokens_alike_in_any_batch():
    moe = load("moe")
    torch.manual_seed(0)
    model = moe.build(num_layers=1)
    layer = model.layers[0].moe
    x = torch.randn(4, 32, 32)
    whole, balance = layer(x)
    parts = [layer(x[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(whole, torch.cat([y for y, _ in parts]))
    torch.testing.assert_close(balance, torch.cat([more for _, more in parts]))
    _, experts = layer.router(x).topk(layer.experts_per_token)
    loads = torch.nn.functional.one_hot(experts, layer.num_experts).sum((1, 2))
    assert loads.max() > layer.capacity > loads.min()  # some choices find their expert full
    full = (loads > layer.capacity).nonzero()[0]
    layer.capacity = 32
    assert not torch.allclose(layer(x)[0][full[0]], whole[full[0]])


def test_batches_come_in_the_same_order():
    gpt = load("gpt")
    first, second = (next(iter(gpt.training_batches(4, seed=1))) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
