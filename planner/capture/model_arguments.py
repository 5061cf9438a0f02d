"""`--set key=value`: text -> arguments of what builds the model and of example_inputs, by their signatures."""

from __future__ import annotations

import ast
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from ...cost_models.errors import AutoparError


def signature_of(target: object) -> Mapping[str, inspect.Parameter]:
    """Parameters of a callable by name."""
    assert callable(target)
    return inspect.signature(target).parameters


def required_by(target: object) -> set[str]:
    """Names of the parameters without a default."""
    skipped = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {k for k, p in signature_of(target).items() if p.default is p.empty and p.kind not in skipped}


def parameters_of(target: object, everything: typing.Iterable[str]) -> set[str]:
    """Names of the keyword arguments of a callable; `everything` where it takes **kwargs."""
    if isinstance(target, nn.Module):
        return set()
    found: set[str] = set()
    for name, parameter in signature_of(target).items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= set(everything)
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found.add(name)
    return found


def batch_parameter(example_inputs: Callable[..., object]) -> str | None:
    """The parameter that takes the batch size, None without one."""
    return next((name for name in signature_of(example_inputs) if name in ("batch_size", "batch", "n")), None)


def converted(
    target: object, example_inputs: object, arguments: Mapping[str, object], file: Path, name: str
) -> dict[str, object]:
    """The values of `--set` as what they are given to asks for.

    Raises:
        AutoparError: an argument that nothing takes, a value of the wrong type, or one that is missing.
    """
    sources = [s for s in (target, example_inputs) if callable(s) and not isinstance(s, nn.Module)]
    valid: set[str] = set()
    for source in sources:
        valid |= parameters_of(source, arguments)
    if example_inputs is not None and callable(example_inputs):
        valid -= {batch_parameter(example_inputs) or ""} - parameters_of(target, ())
    converted = {}
    for key, value in arguments.items():
        if key not in valid:
            known = ", ".join(sorted(valid)) or "none, it takes no arguments"
            raise AutoparError(f"{name} in {file.name} has no argument {key!r}", where=str(file), fix=f"valid: {known}")
        source = next((s for s in sources if key in signature_of(s)), None)
        converted[key] = convert(value, source, key) if isinstance(value, str) and source else value
    missing = required_by(target) - converted.keys() if not isinstance(target, nn.Module) else set()
    if missing:
        wanted = " ".join(f"--set {key}=..." for key in sorted(missing))
        raise AutoparError(f"{name} in {file.name} needs arguments", where=str(file), fix=f"give {wanted}")
    return converted


def convert(text: str, source: object, key: str) -> object:
    """The text of `--set key=text` as the type that the annotation or the default of the parameter asks for.

    Raises:
        AutoparError: the text is none of the types.
    """
    parameter = signature_of(source)[key]
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
