"""Parameters and buffers as code: containers under the user's FQNs, and the expression that reads each one."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ....planner.sharding.mesh import PARAMETER_AXES
from ....planner.sharding.placement import SUMMED_GRADIENT, Layout
from ...held import HeldTensor
from ...source import Expr
from ...text import layout, literal, quote

_NUMBERED = re.compile(r"([^{}]*)number=(\d+)\)")  # the constructor of a block that is told its number
DEFAULT_DTYPE = "float32"  # written without a dtype: it follows torch.get_default_dtype()


def is_plain(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name)


def access(path: str) -> str:
    """The expression of a submodule or tensor under `self`: `self.h["3"].ln_1.weight`."""
    text = "self"
    for part in path.split("."):
        text = f"{text}.{part}" if is_plain(part) else f"{text}[{quote(part)}]"
    return text


@dataclass(slots=True)
class Tree:
    """Modules by name; a leaf is the source that creates a tensor or a block."""

    children: dict[str, Tree | str] = field(default_factory=dict)

    def put(self, path: Sequence[str], leaf: str) -> None:
        *parents, last = path
        node = self
        for name in parents:
            child = node.children.setdefault(name, Tree())
            if isinstance(child, str):
                raise ValueError(f"{'.'.join(path)} lies inside a block")
            node = child
        node.children[last] = leaf


def container(tree: Tree) -> str:
    """The source of one module with everything below it."""
    children = {name: child if isinstance(child, str) else container(child) for name, child in tree.children.items()}
    if children and all(not is_plain(name) and not is_tensor(text) for name, text in children.items()):
        ranged = _comprehension(children)
        if ranged is not None:
            return ranged
        return f"nn.ModuleDict({{{', '.join(f'{quote(name)}: {text}' for name, text in children.items())}}})"
    named = [f"{name}={text}" if is_plain(name) else f"**{{{quote(name)}: {text}}}" for name, text in children.items()]
    return f"Weights({', '.join(named)})"


def _comprehension(children: Mapping[str, str]) -> str | None:
    """`nn.ModuleDict({str(i): Block(mesh) for i in range(4, 8)})` where children are alike and numbered in a row."""
    names = list(children)
    if len(names) < 2 or not all(name.isdecimal() and str(int(name)) == name for name in names):
        return None
    first, last = int(names[0]), int(names[-1])
    if [int(name) for name in names] != list(range(first, last + 1)):
        return None
    offset, texts = 0, set(children.values())
    if any("number=" in text for text in texts):
        # Blocks that draw random numbers; where containers hold them, those of one are not the next after another's.
        blocks = [_NUMBERED.fullmatch(text) for text in children.values()]
        offsets = {int(block[2]) - int(name) if block else None for name, block in zip(names, blocks, strict=True)}
        offset, texts = offsets.pop(), {block[1] for block in blocks if block}
        if offset is None or offsets:
            return None
        texts = {f"{text}number=i{f' + {offset}' if offset else ''})" for text in texts}
    if len(texts) != 1:
        return None
    span = f"{last + 1}" if first == 0 else f"{first}, {last + 1}"
    return f"nn.ModuleDict({{str(i): {texts.pop()} for i in range({span})}})"


def assignments(tree: Tree, indent: str) -> Iterator[str]:
    """Lines `self.name = ...` of a constructor; `self["0"] = ...` for a name that is no identifier."""
    for name, child in tree.children.items():
        text = child if isinstance(child, str) else container(child)
        yield from layout(f"{access(name)} = {text}", indent)


def base_class(tree: Tree) -> str:
    """A class with members such as "0" is indexed by their names."""
    return "nn.Module" if all(is_plain(name) for name in tree.children) else "Weights"


def is_tensor(text: str) -> bool:
    return text.startswith(("parameter(", "nn.Buffer("))


def creation(tensor: HeldTensor, axes: Sequence[str]) -> str:
    """The source that makes the tensor, not yet filled. `axes`: those of the mesh that may split parameters."""
    dtype = "" if tensor.type.dtype == DEFAULT_DTYPE else f"dtype=torch.{tensor.type.dtype}"
    sizes = ", ".join(map(str, tensor.shape))
    if tensor.is_buffer:
        more = "" if tensor.persistent else ", persistent=False"
        if tensor.splits:
            split = [sizes, *([dtype] if dtype else []), "requires_grad=False"]
            return f"nn.Buffer(parameter(mesh, {_placement(tensor, axes)}, {', '.join(split)}).detach(){more})"
        arguments = [literal(tensor.shape), *([dtype] if dtype else [])]
        return f"nn.Buffer(torch.empty({', '.join(arguments)}){more})"
    parts = [sizes] if sizes else []
    if axes:
        parts = ["mesh", _placement(tensor, axes), *parts]
    parts += [dtype] if dtype else []
    parts += [] if tensor.type.requires_grad else ["requires_grad=False"]
    return f"parameter({', '.join(parts)})"


def _placement(tensor: HeldTensor, axes: Sequence[str]) -> str:
    """Its placement on one axis, or the tuple of those on several."""
    dims = [tensor.shard_dim(axis) for axis in axes]
    placements = ["Replicate()" if dim is None else f"Shard({dim})" for dim in dims]
    return placements[0] if len(placements) == 1 else f"({', '.join(placements)})"


def reading(tensor: HeldTensor, path: str, wanted: Layout, handles: Mapping[str, str]) -> Expr:
    """The expression of a tensor's local part, laid out as a unit wants it.

    A use whose gradient is whole on an axis where gradients are added at the end of the step keeps it on the first
    rank.
    """
    text = access(path)
    has_dtensors = not handles.keys().isdisjoint(PARAMETER_AXES)
    if has_dtensors and (not tensor.is_buffer or tensor.splits):
        text = f"local({text})"
    if has_dtensors and tensor.shares_gradient:
        text = f"own_gradient({text})"
    if tensor.fused_dim is not None:
        text = f"{text}.flatten({tensor.fused_dim}, {tensor.fused_dim + 1})"
    elif len(tensor.shape) > len(tensor.type.shape):
        text = f"{text}.squeeze(0)"
    if tensor.type.requires_grad:
        for axis in tensor.partial:
            if wanted.get(axis) != SUMMED_GRADIENT:
                text = f"keep_gradient_on_first({text}, {handles[axis]})"
    return Expr(text, weight=0)
