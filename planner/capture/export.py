"""The only caller of torch.export: a training step -> an FX graph of ATen operations, train and eval mode.

`torch.export` (non-strict) first; `torch.fx.symbolic_trace` before it where it refuses; where both refuse, an error
that names the user's line. What export would lose silently (gradients of custom autograd functions, hooks) is refused.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedModel
from .canonical import MAX_CONSTANT_ELEMENTS, Leaf, Translator
from .flat import FlatGraph
from .graph import Kind
from .modes import flags_by_calls, flags_by_graphs
from .step import TrainingStep

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>\S+)')
_REGION = "wrap_with_autocast"


class NeedsValues(UnsupportedModel):
    """The capture on meta tensors lost something that real tensors have: build the module on the CPU."""


def export_step(step: TrainingStep, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    """Export the step in the mode (train or eval) that it is in.

    Raises:
        UnsupportedModel: neither torch.export nor symbolic tracing can capture it.
    """
    try:
        with _quiet(), _refusing_lost_gradients():
            return torch.export.export(step, tuple(tensors), strict=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        try:
            with _quiet(), _refusing_lost_gradients():
                traced = fx.symbolic_trace(step)
                return torch.export.export(traced, tuple(tensors), strict=False)
        except UnsupportedModel:
            raise
        except Exception:
            raise _refusal(error) from error


def flat_graph(
    step: TrainingStep,
    tensors: Mapping[str, Tensor],
    batch_dims: Mapping[str, int | None],
    canonical: Mapping[str, str],
    trains: set[str],
) -> tuple[FlatGraph, tuple[str, ...]]:
    """Capture a step in canonical form, with notes; `canonical` maps FQNs of parameters and buffers to canonical ones.

    Raises:
        NeedsValues: constants have no values on meta, or autocast acts on real devices only.
        UnsupportedModel: the step cannot be captured.
    """
    on_meta = any(tensor.is_meta for tensor in tensors.values())
    step.train()
    with _recording_training_reads() as reads:
        program = export_step(step, list(tensors.values()))
    train = _translate(program, tuple(tensors), batch_dims, canonical, trains, on_meta)
    if not reads:
        return train, ()
    if on_meta:
        with _quiet():
            flagged = flags_by_calls(step, list(tensors.values()), train)
        if flagged is not None:
            return flagged, ()
    step.eval()
    try:
        program = export_step(step, list(tensors.values()))
        evaluation = _translate(program, tuple(tensors), batch_dims, canonical, trains, on_meta)
    except NeedsValues:
        raise
    except UnsupportedModel as error:
        return train, (f"eval mode cannot be captured: {error.what}",)
    finally:
        step.train()
    return flags_by_graphs(train, evaluation)


def _translate(
    program: torch.export.ExportedProgram,
    names: tuple[str, ...],
    batch_dims: Mapping[str, int | None],
    canonical: Mapping[str, str],
    trains: set[str],
    on_meta: bool,
) -> FlatGraph:
    from torch.export.graph_signature import InputKind

    leaves: dict[str, Leaf] = {}
    inputs = iter(names)
    for spec in program.graph_signature.input_specs:
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.USER_INPUT:
            leaf = Leaf(kind=Kind.INPUT, name=next(inputs))
        elif spec.kind is InputKind.PARAMETER:
            leaf = Leaf(kind=Kind.PARAMETER, name=canonical.get(target, target))
        elif spec.kind is InputKind.BUFFER:
            leaf = Leaf(kind=Kind.BUFFER, name=canonical.get(target, target))
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            leaf = Leaf(
                kind=Kind.CONSTANT, name=target, constant=_constant(program.constants[spec.target or ""], target)
            )
        else:
            raise UnsupportedModel(f"the model uses {spec.kind.name.lower()} {target}, which cannot be planned")
        leaves[getattr(spec.arg, "name", "")] = leaf
    if on_meta and _has_autocast(program.graph_module):
        raise NeedsValues("autocast has no effect on meta tensors")
    return Translator(locate=locate).translate(program.graph_module, leaves, batch_dims, trains)


def _constant(value: Any, name: str) -> object:
    if not isinstance(value, Tensor):
        raise UnsupportedModel(f"constant {name} is no tensor")
    if value.is_meta:
        raise NeedsValues(f"constant {name} has no value on meta")
    if value.requires_grad:
        raise UnsupportedModel(
            f"tensor {name} requires a gradient but is no parameter", fix="make it an nn.Parameter of a module"
        )
    if value.numel() > MAX_CONSTANT_ELEMENTS:
        raise UnsupportedModel(f"constant {name} has {value.numel()} elements", fix="register it with register_buffer")
    return nested_tuples(value.detach().tolist())


def nested_tuples(value: object) -> object:
    return tuple(nested_tuples(item) for item in value) if isinstance(value, list) else value


def _has_autocast(module: fx.GraphModule) -> bool:
    modules = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(
        getattr(node.target, "__name__", "") == _REGION and bool(node.args[2])
        for inner in modules
        for node in inner.graph.nodes
        if node.op == "call_function"
    )


# Guards around the export


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs and prints the whole graph before it raises
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _refusing_lost_gradients() -> Iterator[None]:
    """Refuse what the exported graph would silently drop."""

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        name = cls.__name__
        checkpoint = name == "CheckpointFunction"
        raise UnsupportedModel(
            "reentrant activation checkpointing loses its gradients in the capture"
            if checkpoint
            else f"custom autograd function {name}: its backward would be lost in the capture",
            where=_users_line(traceback.extract_stack()),
            fix="use checkpoint(..., use_reentrant=False), or leave checkpointing to the plan"
            if checkpoint
            else "write it with differentiable tensor operations",
        )

    def register_hook(self: Tensor, hook: object) -> object:
        raise UnsupportedModel(
            "a hook on a tensor's gradient would be lost in the capture",
            where=_users_line(traceback.extract_stack()),
            fix="write the change of the gradient with tensor operations",
        )

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(Tensor, "register_hook", register_hook),
        _SeededConstants() as seeded,
        mock.patch.object(torch, "Generator", seeded.generator),
    ):
        yield


class _SeededConstants(TorchFunctionMode):
    """Draws from a generator that the traced code itself makes are the same in every step: constants."""

    def __init__(self) -> None:
        super().__init__()

        class Seeded(torch.Generator):
            """What `torch.Generator` is meanwhile: still a class, since annotations of modules imported now name it."""

        self.generator = Seeded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None:
            return func(*args, **kwargs)
        if not isinstance(generator, self.generator):
            raise UnsupportedModel(
                "the forward draws from a torch.Generator of its own, whose state the emitted code cannot share",
                where=_users_line(traceback.extract_stack()),
                fix="draw from the default generator, or outside of forward",
            )
        with _disable_current_modes():
            return func(*args, **kwargs)


@contextlib.contextmanager
def _recording_training_reads() -> Iterator[set[str]]:
    """Which modules read `self.training` while the block runs: none means that eval mode is the same."""
    reads: set[str] = set()

    def read(self: nn.Module) -> bool:
        import sys

        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(_TORCH) or f"{_TORCH}/nn/modules/" in file and not file.endswith("/module.py"):
            reads.add(type(self).__name__)
        return self.__dict__["training"]

    def write(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    nn.Module.training = property(read, write)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield reads
    finally:
        del nn.Module.training


# The user's lines


def locate(stack: str) -> str:
    """The innermost line of the user's code in a stack trace, as "file:line in function: code"."""
    found = [match for match in _FRAME.finditer(stack) if not match["file"].startswith((_TORCH, _HERE))]
    if not found:
        return ""
    last = found[-1]
    return _line(last["file"], int(last["line"]), last["function"])


def _line(file: str, line: int, function: str) -> str:
    return f"{Path(file).name}:{line} in {function}: {linecache.getline(file, line).strip()}"


def _users_line(frames: traceback.StackSummary) -> str:
    ours = [f for f in frames if not f.filename.startswith((_TORCH, _HERE)) and f.lineno is not None]
    return _line(ours[-1].filename, ours[-1].lineno or 0, ours[-1].name) if ours else ""


_VALUE_ERRORS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "UserError",
    "DynamicOutputShapeException",
)


def _is_library_module(file: str) -> bool:
    """A file of someone else's that holds modules: of torch.nn.modules, or of another installed package."""
    if file.startswith(_TORCH):
        return file.startswith(f"{_TORCH}/nn/modules/") and not file.endswith("/module.py")
    return "site-packages" in file


def _refusal(error: Exception) -> UnsupportedModel:
    stack = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_HERE, "<"))]
    frames = [f for f in stack if not f.filename.startswith(_TORCH) and "site-packages" not in f.filename]
    where = _line(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""
    called = stack[stack.index(frames[-1]) + 1 :] if frames else stack
    inside = [f for f in called if _is_library_module(f.filename)]
    code = where.partition(": ")[2]
    text = str(error).strip().splitlines()
    reads = type(error).__name__ in _VALUE_ERRORS or "meta tensors" in str(error) or "data-dependent" in str(error)
    if reads and inside:
        line = _line(inside[-1].filename, inside[-1].lineno or 0, inside[-1].name)
        return UnsupportedModel(
            f"a module of a library reads a tensor's value, which a plan made ahead of time cannot know: {line}",
            where=where,
            fix="build the module with options, or give it inputs, for which that line does not run",
        )
    if reads:
        kind = re.match(r"(if|elif|while|assert|for)\b", code)
        subject = f"this `{kind[1]}`" if kind else "this line"
        return UnsupportedModel(
            f"{subject} reads a tensor's value, which a plan made ahead of time cannot know",
            where=where,
            fix="compute it with torch.where or masks, or take the decision outside of forward",
        )
    return UnsupportedModel(
        f"torch.export cannot capture the model: {type(error).__name__}: {text[0] if text else ''}",
        where=where,
        fix="give inputs that the model takes, or rewrite this line with operations that torch.export supports",
    )
