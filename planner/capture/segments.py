"""The operations of a step, cut into consecutive segments along the module calls: blocks whole, others by module.

A call is a block where its class is called at least twice among the outermost calls; other calls are opened. Operations
between blocks are grouped so that each group has the parameters of one module: a pipeline can be cut at every one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .flat import FlatNode, ModuleCall
from .graph import Kind

_CONTAINERS = ("Sequential", "ModuleList", "ModuleDict")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive operations. `call`: the module call they make up (blocks) or that owns their parameters, if any."""

    nodes: tuple[FlatNode, ...]
    call: ModuleCall | None
    is_block: bool


@dataclass(frozen=True, slots=True)
class _Item:
    """A call at some depth of the call tree (`call` is its own), or one operation outside of any (`call` is None)."""

    nodes: tuple[FlatNode, ...]
    depth: int  # how many calls enclose it, its own included
    call: ModuleCall | None

    @property
    def is_composite(self) -> bool:
        """Whether other module calls lie inside."""
        return self.call is not None and any(len(node.calls) > self.depth for node in self.nodes)

    @property
    def may_repeat(self) -> bool:
        return self.is_composite and self.call is not None and self.call.class_name not in _CONTAINERS

    def opened(self) -> list[_Item]:
        return _items(self.nodes, self.depth)


def _items(nodes: Iterable[FlatNode], depth: int) -> list[_Item]:
    found: list[_Item] = []
    for call, group in groupby(nodes, key=lambda node: node.calls[depth] if len(node.calls) > depth else None):
        if call is None:
            found.extend(_Item((node,), depth, None) for node in group)
        else:
            found.append(_Item(tuple(group), depth + 1, call))
    return found


def segments(nodes: Sequence[FlatNode], by_name: Mapping[str, FlatNode]) -> tuple[Segment, ...]:
    """Cut `nodes` (operations in execution order, the prelude left out)."""
    items = _items(nodes, 0)
    settled: set[int] = set()  # ids of items that are blocks
    while True:
        classes = Counter(item.call.class_path for item in items if item.call is not None and item.may_repeat)
        following: list[_Item] = []
        changed = False
        for item in items:
            if id(item) in settled or not item.is_composite:
                following.append(item)
            elif item.may_repeat and item.call is not None and classes[item.call.class_path] > 1:
                settled.add(id(item))
                following.append(item)
            else:
                following.extend(item.opened())
                changed = True
        items = following
        if not changed:
            return tuple(_grouped(items, settled, by_name))


def _grouped(items: Sequence[_Item], blocks: set[int], by_name: Mapping[str, FlatNode]) -> Iterable[Segment]:
    waiting: list[FlatNode] = []
    owner: ModuleCall | None = None
    has_parameters = False
    for item in items:
        is_block = id(item) in blocks
        trained = any(by_name[ref.node].kind is Kind.PARAMETER for node in item.nodes for ref in node.operands)
        if waiting and (is_block or (trained and has_parameters)):
            yield Segment(nodes=tuple(waiting), call=owner, is_block=False)
            waiting, owner, has_parameters = [], None, False
        if is_block:
            yield Segment(nodes=item.nodes, call=item.call, is_block=True)
            continue
        waiting.extend(item.nodes)
        if trained:
            owner, has_parameters = item.call, True
    if waiting:
        yield Segment(nodes=tuple(waiting), call=owner, is_block=False)
