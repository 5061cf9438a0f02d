"""Records a training step, repeated blocks once, and translates it to the canonical flat graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import UnsupportedModel
from ..canonical import Leaf, Translator
from ..constants import NeedsValues
from ..export_guards import quiet, refusing_lost_gradients
from ..flat import FlatGraph
from ..graph import Kind
from ..stamps import same_graph
from ..step import StepFails, Traceable
from . import torch_private
from .block_calls import BlockCalls
from .candidates import Group, find_groups
from .recorder import ModuleCalls, Recorder, Recording, Source
from .refusals import CannotFold, CannotRecord
from .snapshots import OF_MODULES


def recorded_graph(what: Traceable) -> tuple[FlatGraph, tuple[str, ...]]:
    """Record a step in the mode that it is in; the notes say which blocks are not shared, and why.

    Raises:
        NeedsValues: autocast acts on real devices only.
        CannotRecord: torch.export must capture it.
        StepFails: nothing can.
    """
    excluded: frozenset[int] = frozenset()
    notes: tuple[str, ...] = ()
    with _data_free(what) as (tensors, mode):
        while True:
            groups = find_groups(what.step.model, excluded)
            try:
                return _attempt(what, tensors, mode, groups), notes
            except CannotFold as refusal:
                name = next(type(g.members[0].module).__name__ for g in groups if g.number == refusal.group)
                notes = (*notes, f"copies of {name} are captured one by one: {refusal.reason}")
                excluded |= {refusal.group}


def _attempt(
    what: Traceable,
    tensors: Mapping[str, Tensor],
    mode: contextlib.AbstractContextManager[Any],
    groups: tuple[Group, ...],
) -> FlatGraph:
    model = what.step.model
    known: dict[int, Source] = {}
    for kind, found in ((Kind.PARAMETER, model.named_parameters()), (Kind.BUFFER, model.named_buffers())):
        for name, tensor in found:
            known[id(tensor)] = Source(kind=kind, name=name, tensor=tensor)
    paths: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in paths:
            raise CannotRecord(f"a module with two names, {paths[id(module)]} and {path}")
        paths[id(module)] = path
    calls = ModuleCalls(paths)
    recorder = Recorder(known, calls)
    blocks = BlockCalls(groups, recorder, same_graph)
    entries = _buffers(model)
    with _restoring_attributes(model), quiet(), mode, refusing_lost_gradients(), torch_private.as_if_exporting():
        for name, tensor in tensors.items():
            recorder.input(name, tensor)
        try:
            with torch_private.recording(recorder), calls.followed(), blocks.hooked():
                loss = what.step(*tensors.values())
                blocks.check()
                if _buffers(model) != entries:
                    raise CannotRecord("a buffer that is assigned")
            recording = recorder.finish((loss,))
        except (CannotFold, CannotRecord, NeedsValues, StepFails):
            raise
        except Exception as error:  # torch.export says what is wrong
            first = str(error).strip().partition("\n")[0]
            raise CannotRecord(f"{type(error).__name__}: {first}" if first else type(error).__name__) from error
    return _translated(what, recording)


def _translated(what: Traceable, recording: Recording) -> FlatGraph:
    if what.on_meta and recording.has_autocast:
        raise NeedsValues("autocast has no effect on meta tensors")
    try:
        leaves = {name: _leaf(what, source) for name, source in recording.sources.items()}
        return Translator(names=what.canonical).translate(recording, leaves, what.batch_dims)
    except NeedsValues:
        raise
    except UnsupportedModel as error:
        raise CannotRecord(error.what) from error


def _leaf(what: Traceable, source: Source) -> Leaf:
    if source.kind is Kind.CONSTANT:
        return Leaf(kind=source.kind, name=source.name, constant=source.values)
    name = source.name if source.kind is Kind.INPUT else what.canonical.get(source.name, source.name)
    is_trained = source.kind is Kind.PARAMETER and name in what.trains
    return Leaf(kind=source.kind, name=name, requires_grad=is_trained)


def _buffers(model: nn.Module) -> list[int]:
    return [
        id(tensor) for module in model.modules() for tensor in (*module._parameters.values(), *module._buffers.values())
    ]


@contextlib.contextmanager
def _data_free(what: Traceable) -> Iterator[tuple[Mapping[str, Tensor], Any]]:
    """The inputs, and while the block runs the module's tensors, without values: on meta they have none."""
    if what.on_meta:
        yield what.tensors, contextlib.nullcontext()
        return
    fake = torch_private.fake_mode()
    made: dict[int, Tensor] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in what.step.model.modules():
        for entries in (module._parameters, module._buffers):
            places += [(entries, name, tensor) for name, tensor in entries.items() if tensor is not None]
    try:
        for entries, name, tensor in places:
            if id(tensor) not in made:
                made[id(tensor)] = fake.from_tensor(tensor)
            entries[name] = made[id(tensor)]
        yield {name: fake.from_tensor(tensor) for name, tensor in what.tensors.items()}, fake
    finally:
        for entries, name, tensor in places:
            entries[name] = tensor


@contextlib.contextmanager
def _restoring_attributes(model: nn.Module) -> Iterator[None]:
    """Undo what the forward changes in attributes of modules and in containers that they hold, hooks among them."""
    before = [(module, {k: v for k, v in module.__dict__.items() if k not in OF_MODULES}) for module in model.modules()]
    containers = [
        (value, value.copy())
        for module, _ in before
        for value in module.__dict__.values()
        if isinstance(value, list | dict | set)
    ]
    try:
        yield
    finally:
        for module, attributes in before:
            own = module.__dict__
            for name in [name for name in own if name not in attributes and name not in OF_MODULES]:
                del own[name]
            own.update(attributes)
        for value, content in containers:
            if len(value) or len(content):
                value.clear()
                value.extend(content) if isinstance(value, list) else value.update(content)
