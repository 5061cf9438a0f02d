"""A block that runs again once for all calls of the autograd engine that a backward is made of."""

import torch
from autopar.compiler.runtime import recomputed_once
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import create_selective_checkpoint_contexts


class Block(nn.Module):
    """y = x + down(gelu(up(norm(x)))); counts its runs, and how often each of its products is computed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0

    def forward(self, x: torch.Tensor, at: tuple[int, int]) -> torch.Tensor:
        assert at == (3, 1)
        self.runs += 1
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def results_kept():
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def ways():
    yield "plain", lambda block, x: block(x, (3, 1))
    yield "full", lambda block, x: recomputed_once(block, x, (3, 1))
    yield "selective", lambda block, x: recomputed_once(block, x, (3, 1), context_fn=results_kept)


def gradients(run) -> tuple[list[torch.Tensor], int]:
    """Those of the input, then those of each weight by a call of its own, as schedules ask for them."""
    block = Block()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = run(block, x).square().sum()
    found = list(torch.autograd.grad(y, [x], retain_graph=True))
    for p in block.parameters():
        found += torch.autograd.grad(y, [p], retain_graph=True)
    return found, block.runs


def test_it_runs_once_more_and_changes_nothing():
    results = {name: gradients(run) for name, run in ways()}
    assert {name: runs for name, (_, runs) in results.items()} == {"plain": 1, "full": 2, "selective": 2}
    for found, _ in results.values():
        assert all(torch.equal(a, b) for a, b in zip(found, results["plain"][0], strict=True))


class Exponential(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).exp()


def test_inputs_are_free_once_it_has_run_again():
    x = torch.randn(4, 8, requires_grad=True)
    hidden = x * 2
    storage = StorageWeakRef(hidden.untyped_storage())
    y = recomputed_once(Exponential(), hidden)
    del hidden
    assert not storage.expired()
    torch.autograd.grad(y.sum(), [x], retain_graph=True)
    assert storage.expired()


def test_it_runs_again_under_the_autocast_of_its_forward():
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = recomputed_once(block, x, (3, 1))
    block.up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    seen = []
    y.sum().backward()
    assert seen == [torch.bfloat16]


def test_without_gradients_it_is_a_call():
    block = Block()
    with torch.no_grad():
        assert recomputed_once(block, torch.ones(4, 8), (3, 1)).grad_fn is None
    assert block.runs == 1
