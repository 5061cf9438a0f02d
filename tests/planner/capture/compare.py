"""A captured graph against the user's module, eagerly, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from autopar.planner.capture import capture_model, evaluate, run_step, sample_inputs
from autopar.planner.capture.graph import ModelGraph
from torch import Tensor

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "sample_models"
CASES = ROOT / "tests" / "cases"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float
    wanted_loss: float
    gradient_errors: Mapping[str, float]  # relative to the parameter's own gradient and 1e-3 of all
    buffer_errors: Mapping[str, float]
    eval_loss: float
    wanted_eval_loss: float


def capture(path: Path, **options: object) -> ModelGraph:
    return capture_model(path, guarded=False, **options).graph


def outcome(path: Path, *, dtype: torch.dtype = torch.float64, backward: bool = True, **options: object) -> Outcome:
    """One step of both in train mode, then one in eval mode."""
    captured = capture_model(path, guarded=False, **options)
    graph, loaded = captured.graph, captured.loaded
    module = loaded.build("cpu")
    if dtype is not torch.float32:
        module = module.to(dtype)
    sample = sample_inputs(loaded, module, graph.batch_size)
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in sample.tensors.items()}
    sample = replace(sample, tensors=inputs)
    named = dict((*module.named_parameters(), *module.named_buffers()))
    tensors = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in named.items()}
    torch.manual_seed(1)
    wanted = run_step(loaded, module, sample)
    torch.manual_seed(1)
    got = evaluate(graph, tensors, inputs)
    gradients: dict[str, float] = {}
    if backward:
        wanted.backward()
        got.loss.backward()
        gradients = _gradient_errors(dict(module.named_parameters()), tensors)
    buffers = {n: _error(got.buffers.get(n, tensors[n]), b) for n, b in module.named_buffers()}
    module.eval()
    now = {n: t.detach().clone() for n, t in named.items()}
    with torch.no_grad():
        eval_wanted = run_step(loaded, module, sample)
        eval_got = evaluate(graph, now, inputs, training=False)
    return Outcome(
        loss=got.loss.item(),
        wanted_loss=wanted.item(),
        gradient_errors=gradients,
        buffer_errors=buffers,
        eval_loss=eval_got.loss.item(),
        wanted_eval_loss=eval_wanted.item(),
    )


def _error(got: Tensor, want: Tensor) -> float:
    one, other = torch.nan_to_num(got.detach()), torch.nan_to_num(want.detach())
    return float((one - other).abs().double().norm())


def _gradient_errors(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    whole = sum(float(p.grad.norm()) ** 2 for p in parameters.values() if p.grad is not None) ** 0.5
    errors = {}
    for name, parameter in parameters.items():
        want = torch.zeros(()) if parameter.grad is None else parameter.grad
        have = torch.zeros(()) if tensors[name].grad is None else tensors[name].grad
        scale = float(want.norm()) + 1e-3 * whole
        errors[name] = float((have - want).norm()) / scale if scale else float(have.norm())
    return errors


def assert_equal(result: Outcome, *, tolerance: float = 1e-9) -> None:
    assert abs(result.loss - result.wanted_loss) <= tolerance * (1 + abs(result.wanted_loss))
    wrong = {n: e for n, e in result.gradient_errors.items() if not e <= tolerance}
    assert not wrong
    assert all(error <= tolerance for error in result.buffer_errors.values())
    assert abs(result.eval_loss - result.wanted_eval_loss) <= tolerance * (1 + abs(result.wanted_eval_loss))
