"""While the user's forward runs at full depth, a call of a repeated block becomes one node of the graph.

Its template is found by everything that the block can see: arguments (without values), the mode, attributes, global
state. The first call of a kind records the template; the last copy of each template is recorded too and compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from . import torch_private
from .candidates import Group, Member
from .recorder import Recorder
from .refusals import CannotFold
from .templates import CallShape, Template, call_shape, record_template

MAX_SINGLES = 3  # templates of one member each before a group is given up


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The meta of a block's node. `tensors`: parameters and buffers, by name inside, of the copy that was called."""

    group: int
    fqn: str
    template: Template
    tensors: Mapping[str, Tensor]


def block(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the node of a block's call names as its target; it is never run."""
    raise AssertionError("a recorded block is no function")


@dataclass(slots=True)
class _Shared:
    """A template, and whose calls it stands for. `values`: the differing attributes that it read."""

    template: Template
    values: Mapping[tuple[int, str], Hashable]
    members: list[Member]
    key: Hashable
    shape: CallShape
    is_checked: bool = False  # the last copy was recorded too, and is the same


@dataclass(slots=True)
class BlockCalls:
    """The hooks on the blocks of some groups. `same`: whether two templates of a group are the same graph."""

    groups: tuple[Group, ...]
    recorder: Recorder
    same: Callable[[Template, Template, int], bool]
    _shared: dict[Hashable, list[_Shared]] = field(default_factory=dict)

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Put the hooks in the place of the blocks' forward."""
        hooked = [(group, member) for group in self.groups for member in group.members]
        try:
            for group, member in hooked:
                member.module.__dict__["forward"] = self._hook(group, member)
            yield
        finally:
            for _, member in hooked:
                member.module.__dict__.pop("forward", None)

    def _hook(self, group: Group, member: Member) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(group, member, args, kwargs)

        return forward

    def _call(self, group: Group, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch_private.in_transform():
            raise CannotFold(group.number, "it is called in a torch.func transform")
        with torch._C.DisableTorchFunction():
            try:
                shape, tensors = call_shape(args, kwargs)
            except ValueError as error:
                raise CannotFold(group.number, f"an argument is a {error}") from error
            key, values = _key(group, member, shape)
        shared = self._known(member, key, values)
        if shared is None:
            shared = self._recorded(group, member, shape, key, values)
        elif member is group.members[-1] and not shared.is_checked:
            self._compare(group, member, shared)
        template = shared.template
        with torch._C.DisableTorchFunction(), torch_private.unseen():
            results = [like.empty(is_leaf=False) for like in template.results]
            named = {name: tensor for name, _, tensor in reversed(list(member.tensors()))}
            node = self.recorder.append(block, (tuple(tensors),), {}, tuple(results))
        self.recorder.has_autocast |= template.recording.has_autocast
        node.meta["block"] = BlockCall(group.number, member.fqn, template, named)
        found = {"value": lambda value: value, "argument": tensors.__getitem__, "result": results.__getitem__}
        return tree_unflatten([found[kind](value) for kind, value in template.outputs], template.spec)

    def _known(self, member: Member, key: Hashable, values: Mapping[tuple[int, str], Hashable]) -> _Shared | None:
        for shared in self._shared.get(key, ()):
            if all(values[place] == value for place, value in shared.values.items()):
                if member not in shared.members:
                    shared.members.append(member)
                return shared
        return None

    def _recorded(
        self, group: Group, member: Member, shape: CallShape, key: Hashable, values: Mapping[tuple[int, str], Hashable]
    ) -> _Shared:
        self._stop_early(group)
        with torch_private.unseen():
            template = record_template(group, member, shape)
        if _key(group, member, shape)[0] != key:
            raise CannotFold(group.number, "it changes global state")
        read = {place: values[place] for place in template.reads}
        shared = _Shared(template, read, [member], key, shape)
        self._shared.setdefault(key, []).append(shared)
        return shared

    def _stop_early(self, group: Group) -> None:
        ours = [s for alike in self._shared.values() for s in alike if s.members[0] in group.members]
        last = ours[-MAX_SINGLES:]
        if len(last) == MAX_SINGLES and all(len(shared.members) == 1 for shared in last):
            raise CannotFold(group.number, "each copy computes something else")

    def check(self) -> None:
        """Record the last copy of each template too, where that is not done yet; called where the forward has run.

        Raises:
            CannotFold: it differs from the first.
        """
        of = {member: group for group in self.groups for member in group.members}
        for shared in [shared for alike in self._shared.values() for shared in alike if len(shared.members) > 1]:
            if shared.is_checked:
                continue
            member = shared.members[-1]
            group = of[member]
            key, values = _key(group, member, shared.shape)
            if key != shared.key or any(values[place] != value for place, value in shared.values.items()):
                raise CannotFold(group.number, "state around it changes while the model runs")
            self._compare(group, member, shared)

    def _compare(self, group: Group, member: Member, shared: _Shared) -> None:
        with torch_private.unseen():
            again = record_template(group, member, shared.shape)
        if again.reads != shared.template.reads or not self.same(shared.template, again, group.number):
            raise CannotFold(group.number, "copies that look alike compute different things")
        shared.is_checked = True


def _key(group: Group, member: Member, shape: CallShape) -> tuple[Hashable, dict[tuple[int, str], Hashable]]:
    """All that a call can see, and the attributes in which the copies differ."""
    state = member.state()
    values = {(index, name): state[index].get(name) for index, name in group.differing}
    common = tuple(
        tuple((name, value) for name, value in attributes.items() if (index, name) not in values)
        for index, attributes in enumerate(state)
    )
    around = (
        torch.is_grad_enabled(),
        torch._C._is_any_autocast_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
    )
    return (
        group.number,
        shape.leaves,
        repr(shape.spec),
        around,
        member.modes(),
        common,
        group.globals.picture(),
    ), values
