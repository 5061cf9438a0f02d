"""One training step of the user's module in one process: the values that every rank is held to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...planner.capture.model_file import load_model_file
from ...planner.capture.step import run_step, sample_inputs
from ...planner.plan import ModelSource
from .draws import draws_fixed
from .dropout import dropout_off

SEED = 0
SGD_LEARNING_RATE = 0.1
ADAMW_LEARNING_RATE = 1e-2
# As a part of the norm of all gradients: elements whose gradient is nothing but rounding would else get a full step.
ADAMW_EPSILON = {torch.float64: 1e-5, torch.float32: 1e-1}
CLIP_NORM = 1e-2


def optimizers(norm: torch.Tensor) -> dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]]:
    """The optimizers whose first step is compared, by name; `norm` of all gradients. A stage may have no parameters."""
    epsilon = ADAMW_EPSILON[norm.dtype] * float(norm) or 1.0
    return {
        "sgd": lambda parameters: torch.optim.SGD([{"params": parameters}], lr=SGD_LEARNING_RATE),
        "adamw": lambda parameters: torch.optim.AdamW(
            [{"params": parameters}], lr=ADAMW_LEARNING_RATE, eps=epsilon, weight_decay=0.1
        ),
    }


class FixedDtypes(TorchDispatchMode):
    """Watches for floating values that do not follow the dtype of the weights: `found` names the first operation."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.found = dtype, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        if isinstance(first, torch.Tensor) and not self.found:
            real = first.is_floating_point() and first.dtype != self.dtype
            if real or (first.is_complex() and first.dtype.to_real() != self.dtype):
                self.found = f"{func} makes {first.dtype}"
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Everything of one step, by the user's FQNs; a tied tensor is there under each of its names."""

    state: dict[str, torch.Tensor]  # before the step, buffers that are not persistent included
    inputs: dict[str, torch.Tensor]
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    norm: torch.Tensor  # of all gradients, as PyTorch adds it up: on a CPU less exactly than it adds up sums
    exact_norm: torch.Tensor
    buffers: dict[str, torch.Tensor]  # after the step
    stepped: dict[str, dict[str, torch.Tensor]]  # optimizer -> parameters after its step

    def save(self, path: Path) -> None:
        torch.save({name: getattr(self, name) for name in self.__slots__}, path)

    @staticmethod
    def load(path: Path) -> Reference:
        return Reference(**torch.load(path, mmap=True))


def norm_of(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The norm of all numbers together, added up in `dtype` or wider."""
    if not tensors:
        return torch.zeros((), dtype=dtype)
    real = [torch.view_as_real(each) if each.is_complex() else each for each in tensors]
    norms = [torch.linalg.vector_norm(each, dtype=torch.promote_types(each.dtype, dtype)) for each in real]
    return torch.stack([each.to(torch.float64) for each in norms]).norm().to(dtype)


def run_reference(model: ModelSource, path: str, batch_size: int, dtype: str, saved: str) -> str:
    """Build the user's module from `path`, run one step on the whole batch, and save a `Reference`.

    Tensors of the default dtype are made `dtype`; those of a dtype that the user chose keep it.

    Returns which operation of the module does not follow `dtype`; "" if all do.
    """
    torch.set_num_threads(1)
    wanted = getattr(torch, dtype)
    loaded = load_model_file(path, model.name, model.arguments, model.inputs)

    def converted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(wanted) if tensor.dtype == torch.get_default_dtype() else tensor

    module = loaded.build("cpu", seed=SEED)._apply(converted)
    module.train()
    everything = {**module.state_dict(), **dict(module.named_buffers())}  # also buffers that are not persistent
    start = {name: value.detach().clone() for name, value in everything.items()}
    sample = sample_inputs(loaded, module, batch_size, seed=SEED)
    inputs = {name: converted(value) for name, value in sample.tensors.items()}
    step = type(sample)(layout=sample.layout, tensors=inputs)
    with FixedDtypes(wanted) as fixed, dropout_off(), draws_fixed():
        loss = run_step(loaded, module, step)
        loss.backward()
    # Tied parameters under each of their names: the stages of a pipeline may use different ones.
    parameters = dict(module.named_parameters(remove_duplicate=False))
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in parameters.items()
        if parameter.requires_grad
    }
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    norm = norm_of(found, wanted)
    stepped = {}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, make in optimizers(norm).items():
        with torch.no_grad():
            for fqn, parameter in parameters.items():
                parameter.copy_(before[fqn])
        make([parameter for parameter in module.parameters() if parameter.requires_grad]).step()
        stepped[name] = {fqn: parameter.detach().clone() for fqn, parameter in parameters.items()}
    Reference(
        state=start,
        inputs=inputs,
        loss=loss.detach(),
        gradients=gradients,
        norm=norm,
        exact_norm=norm_of(found, torch.float64),
        buffers=buffers,
        stepped=stepped,
    ).save(Path(saved))
    return fixed.found
