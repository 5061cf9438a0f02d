"""The canonical nodes of a repeated block, made once and stamped into the graph for each of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .cells import Cell
from .flat import FlatNode, ModuleCall
from .folded.refusals import CannotFold
from .graph import Arg, Kind, Ref, TensorType

if TYPE_CHECKING:
    from .canonical import Translator
    from .folded.block_calls import BlockCall
    from .folded.recorder import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Nodes under the template's own names. `outputs`: value, and whether it is a view of a value inside.

    `writes`: buffer (name inside the block) -> its new value. `detached`: name of a `detach` that the translation added
    for a region without gradient -> its operand, where that is not computed inside.
    """

    nodes: tuple[FlatNode, ...]
    outputs: tuple[tuple[Ref, bool], ...]
    writes: tuple[tuple[str, Ref], ...]
    detached: Mapping[str, Ref]

    def apply(
        self, translator: Translator, call: BlockCall, arguments: Sequence[Ref], results: Sequence[Tensor]
    ) -> tuple[Cell, ...]:
        """Append the nodes for one call; the cells of its results."""
        builder = translator.builder
        place: dict[Ref, Ref] = {}
        cells: dict[str, Cell] = {}
        calls, around = builder.calls, _Calls(builder.calls)
        for node in self.nodes:
            ref = Ref(node.name)
            if node.kind is Kind.OP:
                if node.name in self.detached:
                    source = place[self.detached[node.name]]
                    if source in builder.detached:
                        place[ref] = builder.detached[source]
                        continue
                new = builder.copy(
                    node,
                    args=tuple([_placed(arg, place) for arg in node.args]),
                    kwargs=tuple([(key, _placed(arg, place)) for key, arg in node.kwargs]),
                    calls=around.inside(node.calls),
                )
                place[ref] = new
                for index in range(1, len(node.outputs)):
                    place[Ref(node.name, index)] = Ref(new.node, index)
                if node.name in self.detached:
                    builder.detached[place[self.detached[node.name]]] = new
            elif node.kind is Kind.INPUT:
                place[ref] = arguments[int(node.name)]
            elif node.kind is Kind.CONSTANT:
                place[ref] = builder.leaf(Kind.CONSTANT, node.name, node.outputs[0], constant=node.constant)
            else:
                cells[node.name] = translator.tensor(call, node)
                place[ref] = cells[node.name].read()
        builder.calls = calls
        for name, ref in self.writes:
            cells[name].write(place[ref])
        return tuple(
            translator.result(place[ref], value, call.group if is_view else None)
            for (ref, is_view), value in zip(self.outputs, results, strict=True)
        )


class _Calls:
    """Module calls inside a block as seen from outside of it, in one call of the block."""

    def __init__(self, around: tuple[ModuleCall, ...]) -> None:
        self._around = around
        self._found: dict[tuple[ModuleCall, ...], tuple[ModuleCall, ...]] = {}

    def inside(self, calls: tuple[ModuleCall, ...]) -> tuple[ModuleCall, ...]:
        if not calls:
            return self._around
        if calls not in self._found:
            block = self._around[-1]
            self._found[calls] = self._around + tuple(
                ModuleCall(f"{block.key}/{call.key}", f"{block.fqn}.{call.fqn}", call.class_path) for call in calls
            )
        return self._found[calls]


def _placed(arg: Arg, place: Mapping[Ref, Ref]) -> Arg:
    if type(arg) is Ref:
        return place[arg]
    if type(arg) is tuple:
        return tuple([_placed(item, place) for item in arg])
    return arg


def make_stamp(recording: Recording, types: Sequence[TensorType], group: int) -> Stamp:
    """Translate a recorded block, given the types of its arguments (with requires_grad).

    Raises:
        CannotFold: it writes to an argument, or returns a view of one or of a parameter.
    """
    from .canonical import Leaf, Translator

    translator = Translator()
    leaves: dict[str, Leaf] = {}
    for name, source in recording.sources.items():
        trains = types[int(source.name)].requires_grad if source.kind is Kind.INPUT else source.tensor.requires_grad
        leaves[name] = Leaf(
            kind=source.kind,
            name=source.name,
            requires_grad=trains and source.kind is not Kind.BUFFER,
            constant=source.values,
        )
    cells = translator.run(recording, leaves)
    own = {id(cell): leaf for leaf, cell, _ in translator.leaves}
    if any(leaf.kind is Kind.INPUT and cell.version for leaf, cell, _ in translator.leaves):
        raise CannotFold(group, "it writes to an argument")
    roots = [cell.root for cell in cells]
    if any(id(root) in own for root in roots) or len({id(root) for root in roots}) < len(roots):
        raise CannotFold(group, "it returns a view of an argument, of a parameter or of another result")
    fixed = {node.name for node in translator.builder.nodes if node.kind is not Kind.OP}
    return Stamp(
        nodes=tuple(translator.builder.nodes),
        outputs=tuple((cell.read(), cell.base is not None) for cell in cells),
        writes=tuple(
            (leaf.name, cell.read())
            for leaf, cell, first in translator.leaves
            if leaf.kind is Kind.BUFFER and cell.read() != first
        ),
        detached={ref.node: source for source, ref in translator.builder.detached.items() if source.node in fixed},
    )


def same_graph(one: Any, other: Any, group: int) -> bool:
    """Whether two templates are the same operations with the same arguments, constants and names inside the block."""

    def described(template: Any) -> object:
        recording = template.recording
        inputs = [source for source in recording.sources.values() if source.kind is Kind.INPUT]
        types = [
            TensorType(
                shape=tuple(s.tensor.shape),
                dtype=str(s.tensor.dtype).removeprefix("torch."),
                requires_grad=s.tensor.requires_grad,
            )
            for s in sorted(inputs, key=lambda source: int(source.name))
        ]
        stamp = make_stamp(recording, types, group)
        return repr((stamp.nodes, stamp.outputs, stamp.writes, template.outputs)), template.results

    return described(one) == described(other)
