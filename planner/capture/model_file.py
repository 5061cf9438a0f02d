"""The user's model file -> how to build the module, its inputs and its loss.

`path[:name]` names a function, an `nn.Module` subclass or an instance; arguments come from `--set`, inputs from the
file, from what the function returns, or from `--input name=int64[B,1024]`.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...cost_models.errors import AutoparError
from ..errors import UnsupportedModel
from .input_spec import InputSpec, parse_input
from .light_torch import Unfilled
from .model_arguments import batch_parameter, converted, parameters_of, required_by, signature_of

NAMES = ("build", "build_model", "model")
DEFAULT_BATCH_SIZE = 8
Inputs = tuple[tuple[object, ...], dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model file, read. Building and making inputs run the user's code again on every call.

    `loss` is the file's `loss(output, *inputs)`, None where the module returns its loss. `takes_batch_size`: inputs of
    any batch size can be made; otherwise only the one batch that the file has.
    """

    path: Path
    name: str
    arguments: Mapping[str, object]
    input_specs: tuple[InputSpec, ...]
    loss: Callable[..., object] | None
    takes_batch_size: bool
    default_batch_size: int
    target: object = field(repr=False)
    example_inputs: Callable[..., object] | None = field(repr=False)
    example_kwargs: Callable[..., object] | None = field(repr=False)

    def build(self, device: str = "cpu", *, seed: int = 0) -> nn.Module:
        """Build the module; the same seed gives the same weights.

        Raises:
            AutoparError: the user's code raised, or built no module.
        """
        return self._build(device, seed)[0]

    def _build(self, device: str, seed: int) -> tuple[nn.Module, object]:
        if isinstance(self.target, nn.Module):
            if device != "cpu":
                raise AutoparError(f"{self.name} is an instance, it cannot be built on {device}", where=str(self.path))
            return copy.deepcopy(self.target), None
        accepted = {k: v for k, v in self.arguments.items() if k in parameters_of(self.target, self.arguments)}
        drawn = Unfilled() if device == "meta" else contextlib.nullcontext()
        with torch.random.fork_rng(devices=[]), torch.device(device), drawn:
            torch.manual_seed(seed)
            made = _call(self.target, f"building {self.name}", self.path, **accepted)
        module, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(module, nn.Module):
            raise AutoparError(
                f"{self.name} returned {type(module).__name__}, not an nn.Module",
                where=str(self.path),
                fix="return a module, or (module, example_inputs)",
            )
        if lazy := next((name for name, value in module.named_parameters() if is_lazy(value)), None):
            raise UnsupportedModel(
                f"parameter {lazy} has no shape before a first forward pass",
                where=str(self.path),
                fix=f"call the module once in {self.name}, or give the sizes (Linear instead of LazyLinear)",
            )
        return module, inputs

    def inputs(self, batch_size: int, *, device: str = "cpu", seed: int = 0) -> Inputs:
        """Example inputs of the step as (args, kwargs), on `device`; the same seed gives the same values.

        Raises:
            AutoparError: the file has no inputs, or not of this batch size.
        """
        if self.input_specs:
            generator = torch.Generator().manual_seed(seed)
            tensors = {s.name: s.tensor(batch_size, generator, device=device) for s in self.input_specs}
            return (), dict(tensors)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            keywords: Any = {}
            if self.example_inputs is None:
                made = self._build("cpu", seed)[1]
                if made is None:
                    raise AutoparError(
                        f"no example inputs in {self.path.name}",
                        where=str(self.path),
                        fix="define example_inputs(batch_size) there, return (module, inputs), or give "
                        "--input NAME=int64[B,1024] for every argument of forward",
                    )
            else:
                given = {k: v for k, v in self.arguments.items() if k in parameters_of(self.example_inputs, ())}
                if self.takes_batch_size:
                    given = {batch_parameter(self.example_inputs): batch_size, **given}
                with torch.device(device):
                    made = _call(self.example_inputs, "example_inputs", self.path, **given)
                    if self.example_kwargs is not None:
                        keywords = _call(self.example_kwargs, "example_kwargs", self.path)
        args, kwargs = _as_inputs(made, self.path)
        return _to_device((args, {**kwargs, **keywords}), device)


def load_model_file(
    path: str | Path, name: str | None, arguments: Mapping[str, object], inputs: Mapping[str, str] | None = None
) -> LoadedModel:
    """Import a model file and find what to build in it; `path` may end in `:name`.

    Raises:
        AutoparError: missing file, nothing or several things to build, wrong `--set` key or value.
    """
    text = str(path)
    if name is None and ":" in Path(text).name:
        text, _, name = text.rpartition(":")
    file = Path(text)
    if not file.is_file():
        raise AutoparError(f"no such model file: {text}", fix="give the path of a Python file that builds an nn.Module")
    module = _import(file)
    found = name or _discover(module, file, arguments)
    if not hasattr(module, found):
        known = ", ".join(_candidates(module)) or "none"
        raise AutoparError(f"{file.name} has no {found!r}", where=str(file), fix=f"candidates: {known}")
    target = getattr(module, found)
    if not (isinstance(target, nn.Module) or callable(target)):
        raise AutoparError(f"{found} in {file.name} is neither a function nor a module", where=str(file))
    example_inputs, example_kwargs, loss = (
        _function(module, file, key) for key in ("example_inputs", "example_kwargs", "loss")
    )
    specs = tuple(parse_input(key, value) for key, value in (inputs or {}).items())
    batch = batch_parameter(example_inputs) if example_inputs is not None else None
    default = DEFAULT_BATCH_SIZE
    if example_inputs is not None and batch is not None:
        value = signature_of(example_inputs)[batch].default
        default = value if isinstance(value, int) else default
    return LoadedModel(
        path=file,
        name=found,
        arguments=converted(target, example_inputs, arguments, file, found),
        input_specs=specs,
        loss=loss,
        takes_batch_size=any(None in spec.shape for spec in specs) if specs else batch is not None,
        default_batch_size=default,
        target=target,
        example_inputs=example_inputs,
        example_kwargs=example_kwargs,
    )


def _function(module: types.ModuleType, file: Path, name: str) -> Callable[..., object] | None:
    """A function that the file may define, None if it does not."""
    found = getattr(module, name, None)
    if found is None or callable(found):
        return found
    raise AutoparError(
        f"{name} in {file.name} is {type(found).__name__}, not a function", where=str(file), fix=f"rename {name}"
    )


def _import(file: Path) -> types.ModuleType:
    folder = str(file.resolve().parent)
    name = f"autopar_model_{file.stem}_{abs(hash(str(file.resolve())))}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise AutoparError(f"{file} is not a Python file", fix="give a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _users_fault(error, f"importing {file.name}", file) from error
    return module


def _discover(module: types.ModuleType, file: Path, arguments: Mapping[str, object]) -> str:
    for name in NAMES:
        if hasattr(module, name):
            return name
    classes = _own_classes(module)
    ready = [name for name in classes if not required_by(getattr(module, name)) - arguments.keys()]
    if len(ready) == 1:
        return ready[0]
    found = ready or classes
    if not found:
        raise AutoparError(
            f"no model in {file.name}",
            where=str(file),
            fix="define build() that returns an nn.Module, or name one: model.py:NAME",
        )
    how = "several models" if ready else "no model without required arguments"
    choices = ", ".join(f"{file.name}:{name}" for name in found)
    raise AutoparError(f"{how} in {file.name}", where=str(file), fix=f"choose one of {choices}")


def _own_classes(module: types.ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]


def _candidates(module: types.ModuleType) -> list[str]:
    named = [name for name in NAMES if hasattr(module, name)]
    instances = [name for name, value in vars(module).items() if isinstance(value, nn.Module) and name not in named]
    return named + _own_classes(module) + instances


def _as_inputs(made: object, file: Path) -> Inputs:
    if isinstance(made, Tensor):
        return (made,), {}
    if isinstance(made, Mapping):
        return (), {str(key): value for key, value in made.items()}
    if isinstance(made, list | tuple):
        return tuple(made), {}
    raise AutoparError(
        f"example_inputs returned {type(made).__name__}",
        where=str(file),
        fix="return a tuple of tensors, or a dict for keyword arguments",
    )


def _to_device(inputs: Inputs, device: str) -> Inputs:
    from torch.utils._pytree import tree_map

    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, inputs)


def _call(function: object, doing: str, file: Path, **kwargs: object) -> object:
    assert callable(function)
    try:
        return function(**kwargs)
    except AutoparError:
        raise
    except (Exception, SystemExit) as error:
        raise _users_fault(error, doing, file) from error


def _users_fault(error: BaseException, doing: str, file: Path) -> AutoparError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file.resolve()]
    frames = frames or [f for f in traceback.extract_tb(error.__traceback__) if f.filename.endswith(file.name)]
    where = f"{file.name}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else str(file)
    text = f": {error}" if str(error) else ""
    fix = "run autopar where that module is installed" if isinstance(error, ImportError) else "mend the model file"
    return UnsupportedModel(f"{doing} raised {type(error).__name__}{text}", where=where, fix=fix)
