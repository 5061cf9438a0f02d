"""Which modules of a model are copies of one another: the groups whose calls may share one graph.

Copies have the same class and equal submodules, parameters and buffers (shapes, strides, dtypes, devices, ties inside
the copy, requires_grad). Other attributes may differ; `Group.differing` names them, and a graph is shared only by
copies that are alike in the ones that it has read. No ModuleList is needed: the outermost repeated modules are taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .snapshots import Globals, Snapshot, globals_of

MIN_SUBMODULES = 2
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One copy. `parts`: itself and its submodules, in an order that is the same in all copies."""

    fqn: str
    module: nn.Module
    parts: tuple[tuple[str, nn.Module], ...]

    def state(self) -> tuple[dict[str, Hashable], ...]:
        """The attributes of every part, now."""
        snapshot = Snapshot(parts={id(part): index for index, (_, part) in enumerate(self.parts)})
        return tuple(snapshot.of_attributes(part) for _, part in self.parts)

    def tensors(self) -> Iterator[tuple[str, bool, Tensor]]:
        """(name inside, whether it is a parameter, tensor), tied ones under each of their names."""
        for path, part in self.parts:
            prefix = f"{path}." if path else ""
            for entries, is_parameter in ((part._parameters, True), (part._buffers, False)):
                for name, tensor in entries.items():
                    if tensor is not None:
                        yield prefix + name, is_parameter, tensor

    def modes(self) -> tuple[bool, ...]:
        return tuple(part.__dict__["training"] for _, part in self.parts)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Copies of one block. `differing`: (part, attribute) pairs that are not equal in all of them."""

    number: int
    members: tuple[Member, ...]
    differing: frozenset[tuple[int, str]]
    globals: Globals


def find_groups(root: nn.Module, excluded: frozenset[int]) -> tuple[Group, ...]:
    """The groups of a model, numbered in the order of their first member; those in `excluded` left out."""
    counts = Counter(id(module) for _, module in root.named_modules(remove_duplicate=False))
    level: list[tuple[str, nn.Module]] = [("", root)]
    grouped: list[list[tuple[str, nn.Module]]] = []
    while level:
        kinds = Counter(type(module) for _, module in level)
        alike: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        below: list[tuple[str, nn.Module]] = []
        for name, module in level:
            structure = _structure(module, counts) if kinds[type(module)] > 1 else None
            if structure is None:
                below.extend(_children(name, module))
            else:
                alike.setdefault(structure, []).append((name, module))
        for copies in alike.values():
            if len(copies) > 1:
                grouped.append(copies)
            else:
                below.extend(_children(*copies[0]))
        level = below
    groups = (_group(number, copies) for number, copies in enumerate(grouped) if number not in excluded)
    return tuple(group for group in groups if group is not None)


def _children(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"{name}.{key}" if name else key, child) for key, child in module.named_children()]


def _structure(module: nn.Module, counts: Counter[int]) -> Hashable | None:
    """What copies have in common, None where the module cannot be one of several copies."""
    if type(module).forward is nn.Module.forward:
        return None  # a container
    ties: dict[int, int] = {}
    found: list[Hashable] = []
    size = 0
    for name, part in module.named_modules(remove_duplicate=False):
        size += 1
        if counts[id(part)] > 1 or "forward" in part.__dict__:
            return None
        if part is not module and any(getattr(part, hooks, None) for hooks in _HOOKS):
            return None
        entries = [
            (key, _type(tensor, ties))
            for tensors in (part._parameters, part._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
        ]
        names = tuple(key for key in part.__dict__ if key != "forward")
        found.append((name, type(part), len(part._parameters), tuple(entries), frozenset(names)))
    return tuple(found) if size > MIN_SUBMODULES else None


def _type(tensor: Tensor, ties: dict[int, int]) -> Hashable:
    tie = ties.setdefault(id(tensor), len(ties))
    layout = tensor.layout
    strides = tensor.stride() if layout is torch.strided else ()
    return (type(tensor), tie, tuple(tensor.shape), strides, tensor.dtype, tensor.device, tensor.requires_grad, layout)


def _group(number: int, copies: Sequence[tuple[str, nn.Module]]) -> Group | None:
    members = tuple(
        Member(name, module, tuple(module.named_modules(remove_duplicate=False))) for name, module in copies
    )
    first = members[0].state()
    differing: set[tuple[int, str]] = set()
    for member in members[1:]:
        for index, (ours, theirs) in enumerate(zip(first, member.state(), strict=True)):
            differing.update((index, name) for name in ours if ours[name] != theirs.get(name))
    classes = {type(part) for _, part in members[0].parts}
    return Group(number, members, frozenset(differing), globals_of(classes))
