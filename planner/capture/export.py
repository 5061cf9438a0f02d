"""The only caller of torch.export: a training step -> its canonical graph, in the mode (train or eval) that it is in.

`torch.export` (non-strict) first; `torch.fx.symbolic_trace` before it where it refuses; where both refuse, an error
that names the user's line. What export would lose silently (gradients of custom autograd functions, hooks) is refused.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ..errors import UnsupportedModel
from .canonical import Leaf, Translator
from .constants import NeedsValues, constant_of
from .export_guards import quiet, refusing_lost_gradients
from .flat import FlatGraph
from .graph import Kind
from .step import Traceable, TrainingStep
from .user_lines import HERE, TORCH, line

_REGION = "wrap_with_autocast"


def _export(step: TrainingStep, tensors: Sequence[Tensor]) -> torch.export.ExportedProgram:
    try:
        with quiet(), refusing_lost_gradients():
            return torch.export.export(step, tuple(tensors), strict=False)
    except UnsupportedModel:
        raise
    except Exception as error:
        try:
            with quiet(), refusing_lost_gradients():
                traced = fx.symbolic_trace(step)
                return torch.export.export(traced, tuple(tensors), strict=False)
        except UnsupportedModel:
            raise
        except Exception:
            raise _refusal(error) from error


def exported_graph(what: Traceable) -> FlatGraph:
    """Export a step, in canonical form.

    Raises:
        NeedsValues: constants have no values on meta, or autocast acts on real devices only.
        UnsupportedModel: the step cannot be captured.
    """
    from torch.export.graph_signature import InputKind

    program = _export(what.step, list(what.tensors.values()))
    leaves: dict[str, Leaf] = {}
    inputs = iter(what.tensors)
    for spec in program.graph_signature.input_specs:
        target = (spec.target or "").removeprefix("model.")
        name = what.canonical.get(target, target)
        if spec.kind is InputKind.USER_INPUT:
            leaf = Leaf(kind=Kind.INPUT, name=next(inputs))
        elif spec.kind is InputKind.PARAMETER:
            leaf = Leaf(kind=Kind.PARAMETER, name=name, requires_grad=name in what.trains)
        elif spec.kind is InputKind.BUFFER:
            leaf = Leaf(kind=Kind.BUFFER, name=name)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = constant_of(program.constants[spec.target or ""], target)
            leaf = Leaf(kind=Kind.CONSTANT, name=target, constant=constant)
        else:
            raise UnsupportedModel(f"the model uses {spec.kind.name.lower()} {target}, which cannot be planned")
        leaves[getattr(spec.arg, "name", "")] = leaf
    if what.on_meta and _has_autocast(program.graph_module):
        raise NeedsValues("autocast has no effect on meta tensors")
    return Translator().translate(program.graph_module, leaves, what.batch_dims)


def _has_autocast(module: fx.GraphModule) -> bool:
    modules = [m for m in module.modules() if isinstance(m, fx.GraphModule)]
    return any(
        getattr(node.target, "__name__", "") == _REGION and bool(node.args[2])
        for inner in modules
        for node in inner.graph.nodes
        if node.op == "call_function"
    )


_VALUE_ERRORS = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "UserError",
    "DynamicOutputShapeException",
)


def _is_library_module(file: str) -> bool:
    """A file of someone else's that holds modules: of torch.nn.modules, or of another installed package."""
    if file.startswith(TORCH):
        return file.startswith(f"{TORCH}/nn/modules/") and not file.endswith("/module.py")
    return "site-packages" in file


def _refusal(error: Exception) -> UnsupportedModel:
    stack = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((HERE, "<"))]
    frames = [f for f in stack if not f.filename.startswith(TORCH) and "site-packages" not in f.filename]
    where = line(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""
    called = stack[stack.index(frames[-1]) + 1 :] if frames else stack
    inside = [f for f in called if _is_library_module(f.filename)]
    code = where.partition(": ")[2]
    text = str(error).strip().splitlines()
    reads = type(error).__name__ in _VALUE_ERRORS or "meta tensors" in str(error) or "data-dependent" in str(error)
    if reads and inside:
        place = line(inside[-1].filename, inside[-1].lineno or 0, inside[-1].name)
        return UnsupportedModel(
            f"a module of a library reads a tensor's value, which a plan made ahead of time cannot know: {place}",
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
