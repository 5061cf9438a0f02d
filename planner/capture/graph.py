"""The DAG that everything after capture reads: a model as a list of units, each an instance of a template.

A *template* is a small graph of tensor operations (one transformer block, the embedding, the head ...). A *unit* is one
instance of a template in execution order: it binds the template's inputs to values and its parameters to the user's
FQNs. Repeated blocks are held once as a template with many units, so everything downstream is independent of depth.

Unit 0 is always the *prelude*: operations on model inputs, buffers and constants that need no parameter, no gradient
and no random numbers (masks, positions, rotary tables, the count of labels). Pipeline cuts fall between other units;
each stage that needs a prelude value computes it itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod


class Kind(Enum):
    INPUT = "input"  # an argument of the template
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # a tensor the capture lifted out of the user's code
    OP = "op"


ITEM_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorType:
    """Shape and dtype of a value. `requires_grad`: a gradient flows to it in training."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


def without_gradient(value: TensorType) -> TensorType:
    return replace(value, requires_grad=False) if value.requires_grad else value


@dataclass(frozen=True, slots=True)
class Ref:
    """Output `index` of node `node` of the same template."""

    node: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch constant inside arguments: dtype ("float32"), device, memory format or layout; `kind` says which."""

    kind: str  # "dtype" | "device" | "memory_format" | "layout"
    name: str


# An argument: a Ref, a Symbol, a Python literal, or a tuple of arguments.
Arg = object


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One value producer.

    `name` is unique in its template, readable and stable: module path relative to the unit plus operation,
    "attn.c_attn.linear". `op` is the overload as torch prints it, "aten.linear.default". `constant` holds the nested
    tuples of a small lifted tensor. `operands` has every tensor argument, left to right, positional before keyword,
    repeated if used twice.
    `source` is "model.py:41 in forward: x = self.c_attn(x)".
    """

    name: str
    kind: Kind
    outputs: tuple[TensorType, ...]
    op: str = ""
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    module: str = ""  # module path relative to the unit ("attn.c_attn")
    source: str = ""
    constant: object = None
    operands: tuple[Ref, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", tuple(refs_of((*self.args, *(v for _, v in self.kwargs)))))

    @property
    def output(self) -> TensorType:
        return self.outputs[0]


def refs_of(arg: Arg) -> Iterator[Ref]:
    """All Refs inside a (nested) argument, left to right."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs_of(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A distinct piece of the model. Nodes are in topological order, INPUT nodes first, in argument order."""

    name: str  # class-like: "Block", "Prelude", "Head"
    pattern: str  # FQN pattern of its units: "h.*", "wte", "" for the prelude
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    is_module: bool = False  # True: units are calls of a user's module with children; emitted as a class
    buffer_updates: tuple[tuple[str, Ref], ...] = ()  # BUFFER node name -> its new value after the step
    by_name: Mapping[str, Node] = field(init=False, repr=False, compare=False)
    # (node, operand position) of those who send a gradient to what they read.
    differentiated: frozenset[tuple[str, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_name = {node.name: node for node in self.nodes}
        if len(by_name) != len(self.nodes):
            raise ValueError(f"node names of template {self.name} are not unique")
        seen: set[str] = set()
        for node in self.nodes:
            for ref in node.operands:
                if ref.node not in seen or ref.index >= len(by_name[ref.node].outputs):
                    raise ValueError(f"{self.name}: {node.name} reads {ref}, which is not defined before it")
            seen.add(node.name)
        object.__setattr__(self, "by_name", by_name)
        object.__setattr__(self, "differentiated", frozenset(self._differentiated()))

    def _differentiated(self) -> Iterator[tuple[str, int]]:
        reached = set(self.outputs)
        for node in reversed(self.nodes):
            if any(value.requires_grad and Ref(node.name, i) in reached for i, value in enumerate(node.outputs)):
                for position, ref in enumerate(node.operands):
                    if self.type_of(ref).requires_grad:
                        reached.add(ref)
                        yield node.name, position

    def type_of(self, ref: Ref) -> TensorType:
        return self.by_name[ref.node].outputs[ref.index]

    def of_kind(self, kind: Kind) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is kind)

    def consumers(self) -> dict[Ref, list[tuple[str, int]]]:
        """For each value, the (node, operand position) pairs that read it, in order."""
        found: dict[Ref, list[tuple[str, int]]] = {}
        for node in self.nodes:
            for position, ref in enumerate(node.operands):
                found.setdefault(ref, []).append((node.name, position))
        return found


@dataclass(frozen=True, slots=True)
class Value:
    """Output `output` of unit `unit`."""

    unit: int
    output: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One instance of a template.

    `inputs` is aligned with the template's INPUT nodes: a Value, or for the prelude the index of a model input.
    `tensors` maps PARAMETER and BUFFER node names to the user's FQNs.
    """

    template: int
    fqn: str  # "h.0"; "" where it is no single module
    inputs: tuple[Value, ...]
    tensors: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """A tensor argument of the user's forward (or loss). `batch_dim`: the dim that holds the samples, if any."""

    name: str
    type: TensorType
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterInfo:
    type: TensorType
    aliases: tuple[str, ...] = ()  # other FQNs of the same tied tensor
    is_buffer: bool = False
    persistent: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """A captured training step: model inputs -> scalar loss.

    The prelude's INPUT nodes are the model inputs, in order (its Unit.inputs is empty). `batch_size` is the number of
    samples the capture saw; all shapes are global, for the whole batch. `tensors` has every parameter and buffer by
    canonical FQN, also unused ones. `notes` are things the user should know (built on CPU, folding fell back ...).
    """

    name: str
    batch_size: int
    inputs: tuple[ModelInput, ...]
    templates: tuple[Template, ...]
    units: tuple[Unit, ...]
    loss: Value
    tensors: Mapping[str, ParameterInfo]
    is_random: bool = False  # some operation draws random numbers in training
    notes: tuple[str, ...] = ()

    def counts(self) -> tuple[int, ...]:
        """How many units each template has."""
        counts = [0] * len(self.templates)
        for unit in self.units:
            counts[unit.template] += 1
        return tuple(counts)

    def template_of(self, unit: int) -> Template:
        return self.templates[self.units[unit].template]

    def type_of(self, value: Value) -> TensorType:
        template = self.template_of(value.unit)
        return template.type_of(template.outputs[value.output])
