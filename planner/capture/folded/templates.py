"""One block recorded by itself, on fresh tensors: the graph that all calls alike share.

What the block reads of the attributes in which copies differ is tracked; what it does beside computing (writes to
attributes, changes its argument containers, reads tensors from elsewhere) makes it unfit to be shared.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..graph import Kind
from ..user_lines import TORCH
from . import torch_private
from .candidates import Group, Member
from .recorder import ModuleCalls, Recorder, Recording, Source
from .refusals import CannotFold, CannotRecord

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True, slots=True)
class TensorLike:
    """Everything about a tensor but its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> TensorLike:
        return TensorLike(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad
        )

    def empty(self, *, is_leaf: bool) -> Tensor:
        """A tensor like this without values. `is_leaf`: one that the user's code could not write to in place."""
        made = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if not self.requires_grad:
            return made
        if is_leaf or not self.is_dense:
            return made.requires_grad_()
        with torch.enable_grad():
            return made.add_(torch.empty((), dtype=self.dtype, device=self.device).requires_grad_())

    @property
    def is_dense(self) -> bool:
        """Whether no two elements share a place."""
        return all(stride > 0 for size, stride in zip(self.shape, self.strides, strict=True) if size > 1)


@dataclass(frozen=True, slots=True)
class CallShape:
    """The arguments of a call without tensor values. `leaves`: (TensorLike, number of the tensor) or a plain value."""

    leaves: tuple[Hashable, ...]
    spec: TreeSpec


@dataclass(frozen=True, slots=True)
class Template:
    """A recorded block. `outputs`: per leaf ("value", v), ("argument", number) or ("result", number)."""

    recording: Recording
    outputs: tuple[tuple[str, Any], ...]
    spec: TreeSpec
    results: tuple[TensorLike, ...]
    reads: frozenset[tuple[int, str]]


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CallShape, list[Tensor]]:
    """The shape of a call and its distinct tensors in order.

    Raises:
        ValueError: an argument that is neither a tensor nor a plain value; its type.
    """
    flat, spec = tree_flatten((args, kwargs))
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    leaves: list[Hashable] = []
    for leaf in flat:
        if isinstance(leaf, Tensor):
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(tensors)
                tensors.append(leaf)
            leaves.append((TensorLike.of(leaf), numbers[id(leaf)]))
        elif type(leaf) in PLAIN:
            leaves.append((type(leaf), leaf))
        else:
            raise ValueError(type(leaf).__name__)
    return CallShape(tuple(leaves), spec), tensors


def record_template(group: Group, member: Member, shape: CallShape) -> Template:
    """Record one call of a copy.

    Raises:
        CannotFold: the call cannot stand for others.
    """

    def refusal(reason: str) -> CannotFold:
        return CannotFold(group.number, reason)

    before, entries = member.state(), _entries(member)
    known = {
        id(tensor): Source(kind=Kind.PARAMETER if is_parameter else Kind.BUFFER, name=name, tensor=tensor)
        for name, is_parameter, tensor in reversed(list(member.tensors()))
    }
    paths = {id(part): path for path, part in member.parts[1:]}
    calls = ModuleCalls(paths)
    recorder = Recorder(known, calls)
    leaves, tensors = _fresh(shape)
    for number, tensor in enumerate(tensors):
        recorder.input(str(number), tensor)
    args, kwargs = tree_unflatten(leaves, shape.spec)
    forward = type(member.module).forward
    try:
        with _tracked(member, group.differing) as reads, calls.followed(), torch_private.recording(recorder):
            result = forward(member.module, *args, **kwargs)
    except CannotRecord as error:
        raise refusal(f"it uses {error}") from error
    after, _ = tree_flatten((args, kwargs))
    if [id(leaf) for leaf in after] != [id(leaf) for leaf in leaves]:
        raise refusal("it changes a container that it is given")
    if member.state() != before or _entries(member) != entries:
        raise refusal("it changes attributes")
    return _template(recorder, result, tensors, frozenset(reads), refusal)


def _fresh(shape: CallShape) -> tuple[list[Any], list[Tensor]]:
    tensors: list[Tensor] = []
    leaves: list[Any] = []
    for first, second in shape.leaves:  # pyright: ignore[reportGeneralTypeIssues]
        if not isinstance(first, TensorLike):
            leaves.append(second)
            continue
        if second == len(tensors):
            tensors.append(first.empty(is_leaf=False))
        leaves.append(tensors[second])
    return leaves, tensors


def _template(
    recorder: Recorder, result: Any, tensors: Sequence[Tensor], reads: frozenset[tuple[int, str]], refusal: Any
) -> Template:
    flat, spec = tree_flatten(result)
    arguments = {id(tensor): number for number, tensor in enumerate(tensors)}
    outputs: list[tuple[str, Any]] = []
    results: list[Tensor] = []
    numbers: dict[int, int] = {}
    for leaf in flat:
        if isinstance(leaf, Tensor):
            if id(leaf) in arguments:
                outputs.append(("argument", arguments[id(leaf)]))
                continue
            if not recorder.knows(leaf):
                raise refusal("it returns a tensor from elsewhere")
            if id(leaf) not in numbers:
                numbers[id(leaf)] = len(results)
                results.append(leaf)
            outputs.append(("result", numbers[id(leaf)]))
        elif type(leaf) in PLAIN:
            outputs.append(("value", leaf))
        else:
            raise refusal(f"it returns a {type(leaf).__name__}")
    return Template(
        recording=recorder.finish(results),
        outputs=tuple(outputs),
        spec=spec,
        results=tuple(TensorLike.of(tensor) for tensor in results),
        reads=reads,
    )


def _entries(member: Member) -> list[tuple[str, bool, int]]:
    return [(name, is_parameter, id(tensor)) for name, is_parameter, tensor in member.tensors()]


# What the block reads of the attributes in which copies differ


class _Watched(dict[str, Any]):
    """The __dict__ of a module whose `hidden` attributes were taken out: looking for them here cannot be tracked."""

    hidden: frozenset[str] = frozenset()

    def _check(self, key: object = None) -> None:
        if (key is None or key in self.hidden) and not sys._getframe(2).f_code.co_filename.startswith(TORCH):
            raise CannotRecord("__dict__ to read attributes that differ between its copies")

    def __getitem__(self, key: str) -> Any:
        self._check(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._check(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        self._check()
        return super().__iter__()

    def keys(self) -> Any:
        self._check()
        return super().keys()

    def items(self) -> Any:
        self._check()
        return super().items()

    def values(self) -> Any:
        self._check()
        return super().values()


@contextlib.contextmanager
def _tracked(member: Member, differing: frozenset[tuple[int, str]]) -> Iterator[set[tuple[int, str]]]:
    """Collect which of the differing attributes are read in this block."""
    hidden: dict[int, dict[str, Any]] = {}
    originals: list[tuple[nn.Module, dict[str, Any]]] = []
    numbers: Mapping[int, int] = {id(part): index for index, (_, part) in enumerate(member.parts)}
    reads: set[tuple[int, str]] = set()
    getattr_of_modules = nn.Module.__getattr__

    def read(module: nn.Module, name: str) -> Any:
        found = hidden.get(id(module))
        if found is not None and name in found:
            reads.add((numbers[id(module)], name))
            return found[name]
        return getattr_of_modules(module, name)

    by_part: dict[int, set[str]] = {}
    for index, name in differing:
        by_part.setdefault(index, set()).add(name)
    try:
        for index, names in by_part.items():
            part = member.parts[index][1]
            own = part.__dict__
            watched = _Watched({key: value for key, value in own.items() if key not in names})
            watched.hidden = frozenset(names)
            hidden[id(part)] = {name: own[name] for name in names}
            originals.append((part, own))
            object.__setattr__(part, "__dict__", watched)
        nn.Module.__getattr__ = read  # pyright: ignore[reportAttributeAccessIssue]
        yield reads
    finally:
        nn.Module.__getattr__ = getattr_of_modules  # pyright: ignore[reportAttributeAccessIssue]
        for part, own in originals:
            changed = {key: dict.__getitem__(part.__dict__, key) for key in dict.keys(part.__dict__)}
            own.update(changed)
            object.__setattr__(part, "__dict__", own)
