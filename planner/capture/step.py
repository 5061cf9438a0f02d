"""A module, its inputs and its loss as one function of named tensors: tensors -> scalar loss."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import AutoparError, UnsupportedModel
from .model_file import Inputs, LoadedModel
from .user_lines import calling_itself, raising


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLayout:
    """How named tensors make up the (args, kwargs) of a step. `leaves`: a name for a tensor, else the value."""

    names: tuple[str, ...]
    leaves: tuple[tuple[str, object], ...]  # (name, None) or ("", value)
    spec: TreeSpec

    def inputs(self, tensors: Iterable[Tensor]) -> Inputs:
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if name else value for name, value in self.leaves], self.spec)


def input_layout(module: nn.Module, loss: Callable[..., object] | None, inputs: Inputs) -> InputLayout:
    """Name every tensor of the inputs after the parameter of forward (or of the loss function) that takes it."""
    args, kwargs = inputs
    names = [*_positional_names(module.forward), *_positional_names(loss)[_num_positional(module.forward, args) + 1 :]]
    tops = [names[i] if i < len(names) else f"input_{i}" for i in range(len(args))]
    tree: dict[str, object] = {**dict(zip(tops, args, strict=True)), **kwargs}
    leaves: list[tuple[str, object]] = []
    found: list[str] = []
    for top, value in tree.items():
        flat, _ = tree_flatten(value)
        count = sum(isinstance(leaf, Tensor) for leaf in flat)
        for index, leaf in enumerate(flat):
            if not isinstance(leaf, Tensor):
                leaves.append(("", leaf))
                continue
            name = top if count == 1 else f"{top}_{index}"
            leaves.append((name, None))
            found.append(name)
    return InputLayout(names=tuple(found), leaves=tuple(leaves), spec=tree_flatten(inputs)[1])


def _positional_names(function: Callable[..., object] | None) -> list[str]:
    if function is None:
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(function).parameters.items() if p.kind in kinds]


def _num_positional(function: Callable[..., object], args: tuple[object, ...]) -> int:
    """How many of the inputs `forward` takes; the rest is for the loss."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return len(args)
    return min(len(args), len(_positional_names(function)))


class StepFails(UnsupportedModel):
    """The user's step fails by itself: no other way to capture it would help."""


class TrainingStep(nn.Module):
    """forward(*tensors) -> the scalar loss of one step of the user's module.

    Raises:
        StepFails: it ends the program, calls itself without end, or returns no scalar.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., object] | None, layout: InputLayout) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._layout = layout

    def forward(self, *tensors: Tensor) -> Tensor:
        try:
            return self._loss_of(tensors)
        except SystemExit as error:
            what = f"the model ends the program: SystemExit({error.code!r})"
            raise StepFails(what, where=raising(error), fix="raise an error of another kind, or none") from None
        except RecursionError as error:
            if where := calling_itself(error):
                raise StepFails(
                    f"the model calls itself without end, or deeper than the {sys.getrecursionlimit()} calls of Python",
                    where=where,
                    fix="end the recursion, or write it as a loop",
                ) from None
            raise

    def _loss_of(self, tensors: Iterable[Tensor]) -> Tensor:
        args, kwargs = self._layout.inputs(tensors)
        taken = _num_positional(self.model.forward, args)
        output = self.model(*args[:taken], **_accepted(self.model.forward, kwargs))
        if self._loss is not None:
            return _scalar(self._call_loss(output, args, kwargs))
        return _scalar(output)

    def _call_loss(self, output: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        assert self._loss is not None
        parameters = inspect.signature(self._loss).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return self._loss(output, *args, **_accepted(self._loss, kwargs))
        count = len(_positional_names(self._loss)) - 1
        return self._loss(output, *args[:count], **_accepted(self._loss, kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traceable:
    """A step and what a trace of it must know: inputs by name and their batch dims, canonical FQNs of tied tensors,
    FQNs of trained parameters."""

    step: TrainingStep
    tensors: Mapping[str, Tensor]
    batch_dims: Mapping[str, int | None]
    canonical: Mapping[str, str]
    trains: frozenset[str]

    @property
    def on_meta(self) -> bool:
        return any(tensor.is_meta for tensor in self.tensors.values())


def _accepted(function: Callable[..., object], kwargs: Mapping[str, object]) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(kwargs)
    return {name: value for name, value in kwargs.items() if name in parameters}


def _scalar(output: object) -> Tensor:
    """The loss in what a module or a loss returned: a scalar, `.loss`, ["loss"] or the one scalar of a tuple."""
    if isinstance(output, Tensor):
        candidates = [output]
    elif getattr(output, "loss", None) is not None:
        candidates = [output.loss]  # pyright: ignore[reportAttributeAccessIssue]
    elif isinstance(output, Mapping) and "loss" in output:
        candidates = [output["loss"]]
    elif isinstance(output, tuple | list):
        candidates = [item for item in output if isinstance(item, Tensor) and item.numel() == 1]
    else:
        candidates = []
    if len(candidates) == 1 and candidates[0].numel() == 1 and candidates[0].is_floating_point():
        return candidates[0].reshape(())
    got = type(output).__name__
    if isinstance(output, Tensor):
        got = f"a tensor of {str(output.dtype).removeprefix('torch.')} and shape {list(output.shape)}"
    raise StepFails(
        f"the model returns {got}: there is no scalar loss to train with",
        where="the result of forward, or of loss(output, *inputs)",
        fix="return the loss, an output with .loss, or define loss(output, *inputs) in the model file",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Inputs of one batch: tensors by name, in order."""

    layout: InputLayout
    tensors: Mapping[str, Tensor]


def sample_inputs(
    loaded: LoadedModel, module: nn.Module, batch_size: int, *, device: str = "cpu", seed: int = 0
) -> Sample:
    """The step's inputs by name, each its own tensor (a tensor given twice is copied)."""
    inputs = loaded.inputs(batch_size, device=device, seed=seed)
    _check_inputs(loaded, module, inputs)
    layout = input_layout(module, loaded.loss, inputs)
    seen: set[int] = set()
    tensors: list[Tensor] = []
    for leaf in tree_flatten(inputs)[0]:
        if isinstance(leaf, Tensor):
            tensors.append(leaf.clone() if id(leaf) in seen else leaf)
            seen.add(id(leaf))
    return Sample(layout=layout, tensors=dict(zip(layout.names, tensors, strict=True)))


def _check_inputs(loaded: LoadedModel, module: nn.Module, inputs: Inputs) -> None:
    """Refuse inputs that forward and the file's loss do not take or still lack, before the capture trips over them."""
    args, kwargs = inputs
    forward = inspect.signature(module.forward)
    parameters = dict(forward.parameters)
    if loaded.loss is not None:
        parameters |= inspect.signature(loaded.loss).parameters
    where, source = str(loaded.path), "--input" if loaded.input_specs else "example_inputs"
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in kwargs if name not in parameters and not takes_any]
    if unknown:
        raise AutoparError(
            f"forward has no argument {unknown[0]!r} ({source})", where=where, fix=f"it takes: {', '.join(parameters)}"
        )
    taken = _num_positional(module.forward, args)
    used = taken if loaded.loss is None else max(taken, _num_positional(loaded.loss, (None, *args)) - 1)
    if used < len(args):
        raise AutoparError(
            f"{source} gives {len(args)} inputs, but only {used} are used",
            where=where,
            fix=f"forward takes: {', '.join(forward.parameters) or 'nothing'}; loss(output, *inputs) can take more",
        )
    try:
        forward.bind(*args[:taken], **_accepted(module.forward, kwargs))
    except TypeError as error:
        raise AutoparError(
            f"the inputs do not fit forward: {error}",
            where=where,
            fix=f"give what it takes ({', '.join(forward.parameters)}) in {source}",
        ) from error


def run_step(loaded: LoadedModel, module: nn.Module, sample: Sample) -> Tensor:
    """The user's loss on these inputs, eagerly: the reference that everything else must equal.

    A step that writes to its inputs writes to a copy: the batch is as it was.
    """
    with torch.enable_grad():
        return TrainingStep(module, loaded.loss, sample.layout)(*(value.clone() for value in sample.tensors.values()))
