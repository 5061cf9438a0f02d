"""The way in: a model file -> `CapturedModel`, the folded graph of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...cost_models.errors import AutoparError
from ..errors import UnsupportedModel
from .constants import NeedsValues
from .flat import FlatGraph
from .folding import fold
from .graph import ModelGraph, ParameterInfo, TensorType
from .guard import guard
from .light_torch import light_meta, without_garbage_collection
from .model_file import LoadedModel, load_model_file
from .step import Sample, Traceable, TrainingStep, sample_inputs
from .step_graph import step_graph

MAX_CPU_BYTES = 8 << 30  # a module larger than this is not built on the CPU only to be captured


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedModel:
    """A captured model file. `device` says where the module was built for the capture: "meta" or "cpu"."""

    graph: ModelGraph
    loaded: LoadedModel
    device: str


def capture_model(
    path: str | Path,
    *,
    name: str | None = None,
    arguments: Mapping[str, object] | None = None,
    inputs: Mapping[str, str] | None = None,
    batch_size: int | None = None,
    guarded: bool = True,
    is_exact: bool = False,
) -> CapturedModel:
    """Capture the training step of a model file at this global batch size (None: the file's own).

    `guarded`: compare the graph with one eager step in a child process, where that is quick.
    `is_exact`: trace every operation with torch.export, instead of recording repeated blocks once.

    Raises:
        AutoparError: the file, its arguments or inputs are wrong.
        UnsupportedModel: the module cannot be captured.
    """
    loaded = load_model_file(path, name, arguments or {}, inputs)
    size = loaded.default_batch_size if batch_size is None else batch_size
    if size < 1:
        raise AutoparError(f"batch size {size} is not positive", fix="give a batch size of at least 1")
    with without_garbage_collection():
        captured = _on_meta_or_cpu(loaded, size, batch_size is None, is_exact)
    note = guard(captured.graph, loaded) if guarded else None
    if note is None:
        return captured
    return replace(captured, graph=replace(captured.graph, notes=(*captured.graph.notes, note)))


def _on_meta_or_cpu(loaded: LoadedModel, size: int, is_default: bool, is_exact: bool) -> CapturedModel:
    notes: list[str] = []
    if isinstance(loaded.target, nn.Module):
        return _captured(loaded, "cpu", size, is_default, is_exact, notes)
    try:
        with light_meta():
            return _captured(loaded, "meta", size, is_default, is_exact, notes)
    except AutoparError as error:
        reason = error
    if not isinstance(reason, NeedsValues) and reason.__cause__ is None:
        raise reason  # our own refusal, which real tensors would not change
    notes.append(f"built on the CPU, since on meta: {reason.what}")
    return _captured(loaded, "cpu", size, is_default, is_exact, notes)


def _captured(
    loaded: LoadedModel, device: str, size: int, is_default: bool, is_exact: bool, notes: list[str]
) -> CapturedModel:
    module = loaded.build(device)
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    if device == "cpu" and parameters > MAX_CPU_BYTES:
        raise UnsupportedModel(
            f"the module cannot be captured on meta and is too large to be built here: {parameters / 2**30:.1f} GiB",
            fix="; ".join(notes),
        )
    sample, batch_dims, size = batch_of(loaded, module, size, device, is_default)
    flat, more = flat_of(loaded, module, sample, batch_dims, is_exact=is_exact)
    graph = fold(
        flat,
        name=loaded.path.stem,
        batch_size=size,
        tensors=tensor_infos(module),
        notes=(*notes, *more),
    )
    return CapturedModel(graph=graph, loaded=loaded, device=device)


def flat_of(
    loaded: LoadedModel,
    module: nn.Module,
    sample: Sample,
    batch_dims: Mapping[str, int | None],
    *,
    is_exact: bool = False,
) -> tuple[FlatGraph, tuple[str, ...]]:
    """Capture a built module, unfolded. `is_exact`: by torch.export alone."""
    if any(parameter._backward_hooks for parameter in module.parameters()):
        raise UnsupportedModel(
            "a parameter has a gradient hook, which the emitted code would not run",
            fix="remove register_hook from the parameters",
        )
    infos = tensor_infos(module)
    what = Traceable(
        step=TrainingStep(module, loaded.loss, sample.layout),
        tensors=sample.tensors,
        batch_dims=batch_dims,
        canonical={alias: fqn for fqn, info in infos.items() for alias in (fqn, *info.aliases)},
        trains=frozenset(fqn for fqn, info in infos.items() if info.type.requires_grad),
    )
    return step_graph(what, is_exact=is_exact)


def tensor_infos(module: nn.Module) -> dict[str, ParameterInfo]:
    """Every parameter and buffer by canonical FQN (the first one), with the other names of tied tensors."""
    names: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    parameters = list(module.named_parameters(remove_duplicate=False))
    buffers = list(module.named_buffers(remove_duplicate=False))
    for name, tensor in (*parameters, *buffers):
        names.setdefault(id(tensor), []).append(name)
        found[id(tensor)] = tensor
    persistent = set(module.state_dict(keep_vars=True))
    is_parameter = {id(tensor) for _, tensor in parameters}
    infos = {}
    for key, fqns in names.items():
        tensor = found[key]
        infos[fqns[0]] = ParameterInfo(
            type=TensorType(
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                requires_grad=tensor.requires_grad,
            ),
            aliases=tuple(fqns[1:]),
            is_buffer=key not in is_parameter,
            persistent=any(fqn in persistent for fqn in fqns),
        )
    return infos


def batch_of(
    loaded: LoadedModel, module: nn.Module, size: int, device: str, is_default: bool
) -> tuple[Sample, dict[str, int | None], int]:
    """The inputs of a step, which of their dims hold the samples, and how many samples there are.

    Raises:
        AutoparError: the file has inputs of one batch size only, and another one is asked for.
    """
    sample = _sample(loaded, module, size, device)
    if loaded.takes_batch_size:
        return sample, _batch_dims(loaded, sample, _sample(loaded, module, 2 * size, device), size), size
    counts = [tensor.shape[0] for tensor in sample.tensors.values() if tensor.dim() > 0]
    found = counts[0] if counts else 1
    if found < 1:
        raise AutoparError(f"the inputs of {loaded.path.name} hold no sample", where=str(loaded.path), fix="give some")
    if not is_default and found != size:
        raise AutoparError(
            f"batch size {size} asked for, but the inputs in {loaded.path.name} have {found} samples",
            where=str(loaded.path),
            fix="give example_inputs a batch_size argument, or use --input NAME=int64[B,...]",
        )
    dims = {n: 0 if t.dim() > 0 and t.shape[0] == found else None for n, t in sample.tensors.items()}
    return sample, dims, found


def _batch_dims(loaded: LoadedModel, sample: Sample, other: Sample, size: int) -> dict[str, int | None]:
    """The dim of each input that grows with the batch: `sample` has `size` samples and `other` twice as many."""

    def refusal(what: str) -> AutoparError:
        return AutoparError(
            f"example_inputs({size}) and example_inputs({2 * size}) {what}",
            where=str(loaded.path),
            fix="return that many samples, or take no batch_size where there is one batch only",
        )

    before = {name: tuple(tensor.shape) for name, tensor in sample.tensors.items()}
    after = {name: tuple(tensor.shape) for name, tensor in other.tensors.items()}
    if {name: len(shape) for name, shape in before.items()} != {name: len(shape) for name, shape in after.items()}:
        raise refusal("give other inputs, not the same ones with more samples")
    dims: dict[str, int | None] = {}
    for name, shape in before.items():
        pairs = enumerate(zip(shape, after[name], strict=True))
        dims[name] = next((dim for dim, (one, two) in pairs if one and two == 2 * one and one % size == 0), None)
    if dims and not any(dim is not None for dim in dims.values()):
        raise refusal("give no input that many samples")
    return dims


def _sample(loaded: LoadedModel, module: nn.Module, size: int, device: str) -> Sample:
    if device != "meta":
        return sample_inputs(loaded, module, size, device=device)
    try:
        return sample_inputs(loaded, module, size, device="meta")
    except UnsupportedModel:  # the user's code draws with a CPU generator, say
        made = sample_inputs(loaded, module, size, device="cpu")
        return Sample(
            layout=made.layout, tensors={name: tensor.to(torch.device("meta")) for name, tensor in made.tensors.items()}
        )
