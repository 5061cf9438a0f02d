"""The user's model file -> how to build the module, its inputs and its loss.

`path[:name]` names a function, an `nn.Module` subclass or an instance; arguments come from `--set`, inputs from the
file, from what the function returns, or from `--input name=int64[B,1024]`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import inspect
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...cost_models.errors import AutoparError
from ..errors import UnsupportedModel
from .light_torch import Unfilled

NAMES = ("build", "build_model", "model")
DEFAULT_BATCH_SIZE = 8
Inputs = tuple[tuple[object, ...], dict[str, object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """`--input name=int64[B,1024]<50257`: B is the batch size; integers lie in [0, limit), 2 without a limit."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    limit: int | None = None

    def tensor(self, batch_size: int, generator: torch.Generator, *, device: str = "cpu") -> Tensor:
        """Values of the input; those on meta take no memory.

        Raises:
            AutoparError: it does not fit in this machine's memory.
        """
        shape = [batch_size if size is None else size for size in self.shape]
        dtype = getattr(torch, self.dtype)
        try:
            if device == "meta":
                return torch.empty(shape, dtype=dtype, device="meta")
            return self._drawn(shape, dtype, generator).to(device)
        except RuntimeError as error:
            raise AutoparError(
                f"cannot make the input {self.name} of shape {shape}: {str(error).splitlines()[0]}",
                fix=f"give --input {self.name} smaller sizes",
            ) from error

    def _drawn(self, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
        return torch.randint(self.limit or 2, shape, generator=generator, device="cpu").to(dtype)


_SPEC = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:<(?P<limit>\d+))?")


def parse_input(name: str, text: str) -> InputSpec:
    """Read the right-hand side of `--input name=...`.

    Raises:
        AutoparError: not of the form dtype[sizes], or no such dtype.
    """
    match = _SPEC.fullmatch(text.replace(" ", ""))
    fix = f"write --input {name}=int64[B,1024]; B is the batch size, int64[B,1024]<50257 bounds the values"
    if match is None:
        raise AutoparError(f"cannot read --input {name}={text}", fix=fix)
    dtype = {"float": "float32", "int": "int64", "long": "int64"}.get(match["dtype"], match["dtype"])
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise AutoparError(f"--input {name}={text}: torch has no dtype {dtype!r}", fix=fix)
    sizes = [size for size in match["shape"].split(",") if size]
    if not all(size == "B" or size.isdigit() for size in sizes):
        raise AutoparError(f"--input {name}={text}: sizes are numbers or B", fix=fix)
    limit = int(match["limit"]) if match["limit"] else None
    if limit == 0:
        raise AutoparError(f"--input {name}={text}: no value lies below 0", fix=fix)
    shape = tuple(None if size == "B" else int(size) for size in sizes)
    return InputSpec(name=name, dtype=dtype, shape=shape, limit=limit)


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
        accepted = {k: v for k, v in self.arguments.items() if k in _parameters(self.target, self.arguments)}
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
                given = {k: v for k, v in self.arguments.items() if k in _parameters(self.example_inputs, ())}
                if self.takes_batch_size:
                    given = {_batch_parameter(self.example_inputs): batch_size, **given}
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
    batch = _batch_parameter(example_inputs) if example_inputs is not None else None
    default = DEFAULT_BATCH_SIZE
    if example_inputs is not None and batch is not None:
        value = _signature(example_inputs)[batch].default
        default = value if isinstance(value, int) else default
    return LoadedModel(
        path=file,
        name=found,
        arguments=_converted(target, example_inputs, arguments, file, found),
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
    ready = [name for name in classes if not _required(getattr(module, name)) - arguments.keys()]
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


def _signature(target: object) -> Mapping[str, inspect.Parameter]:
    assert callable(target)
    return inspect.signature(target).parameters


def _required(target: object) -> set[str]:
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {k for k, p in _signature(target).items() if p.default is p.empty and p.kind not in skipped}


def _parameters(target: object, everything: typing.Iterable[str]) -> set[str]:
    """Names of the keyword arguments of a callable; `everything` where it takes **kwargs."""
    if isinstance(target, nn.Module):
        return set()
    found: set[str] = set()
    for name, parameter in _signature(target).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= set(everything)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found.add(name)
    return found


def _batch_parameter(example_inputs: Callable[..., object]) -> str | None:
    return next((name for name in _signature(example_inputs) if name in ("batch_size", "batch", "n")), None)


def _converted(
    target: object, example_inputs: object, arguments: Mapping[str, object], file: Path, name: str
) -> dict[str, object]:
    sources = [s for s in (target, example_inputs) if callable(s) and not isinstance(s, nn.Module)]
    valid: set[str] = set()
    for source in sources:
        valid |= _parameters(source, arguments)
    if example_inputs is not None and callable(example_inputs):
        valid -= {_batch_parameter(example_inputs) or ""} - _parameters(target, ())
    converted = {}
    for key, value in arguments.items():
        if key not in valid:
            known = ", ".join(sorted(valid)) or "none, it takes no arguments"
            raise AutoparError(f"{name} in {file.name} has no argument {key!r}", where=str(file), fix=f"valid: {known}")
        source = next((s for s in sources if key in _signature(s)), None)
        converted[key] = convert(value, source, key) if isinstance(value, str) and source else value
    missing = _required(target) - converted.keys() if not isinstance(target, nn.Module) else set()
    if missing:
        wanted = " ".join(f"--set {key}=..." for key in sorted(missing))
        raise AutoparError(f"{name} in {file.name} needs arguments", where=str(file), fix=f"give {wanted}")
    return converted


def convert(text: str, source: object, key: str) -> object:
    """The text of `--set key=text` as the type that the annotation or the default of the parameter asks for.

    Raises:
        AutoparError: the text is none of the types.
    """
    parameter = _signature(source)[key]
    try:
        hint = typing.get_type_hints(source.__init__ if isinstance(source, type) else source).get(key)
    except (NameError, TypeError):
        hint = None
    if hint is None and parameter.default not in (None, parameter.empty):
        hint = type(parameter.default)
    kinds = (
        typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else ()
    )
    kinds = kinds or ((hint,) if hint is not None else ())
    if types.NoneType in kinds and text.lower() == "none":
        return None
    for kind in (bool, int, float):
        if kind in kinds:
            try:
                return _literal(text, kind)
            except ValueError:
                continue
    if not kinds or str in kinds:
        return text if kinds else _guess(text)
    if not any(kind in (bool, int, float) for kind in kinds):
        return _guess(text)
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    raise AutoparError(f"--set {key}={text}: expected {names}", fix=f"give {key} as {names}")


def _literal(text: str, kind: type) -> object:
    if kind is bool:
        if text.lower() in ("true", "false", "1", "0", "yes", "no"):
            return text.lower() in ("true", "1", "yes")
        raise ValueError(text)
    return kind(text.replace("_", ""))


def _guess(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


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
    return UnsupportedModel(f"{doing} raised {type(error).__name__}{text}", where=where)
