"""What an operation's sharding rule declares, and the registry that holds the rules.

On one mesh axis an operation picks one *option*: a factor that is split ("b", "n", "k" ...), or

- "none": computed alike on every rank, all pairs R;
- "grad": computed alike, each rank's gradient a partial sum, all pairs R/P (backward is linear in the output gradient);
- "partial": operations linear in an operand pass partial sums through (that operand P/R, the others R/P).

A factor's pairs follow from where it lies: an operand that holds it at dim i is S(i), one that lacks it is R/P; an
output that holds it is S(j), one that lacks it (contracted) is P/R.

An option with `takes_groups` exists in grouped forms as well: label "d2;3" is "d2" with the groups of every split times
three. Which group counts are worth asking for follows from the views of a template: `interesting_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache

from ....cost_models.errors import AutoparError
from ....cost_models.work import Pass, Work
from ...capture.graph import Arg, Kind, Node, Ref, Template, TensorType
from ..placement import REPLICATED, SUMMED_GRADIENT, Pair, split
from ..redistribute import CollectiveUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run an operation on one axis. `operands` follows `node.operands`, `outputs` follows `node.outputs`.

    `extent` must be divisible by the axis size, times the sizes of other axes that pick the same label (0: any size).
    `runs_collectives`: the body communicates inside, so the option cannot be taken on the microbatch axis.
    `takes_groups`: any set of positions of the split dim may be computed apart from the others, so grouped splits are
    exact too.
    `one_axis`: the body splits over one axis only, so no second axis may take the same label.
    """

    label: str
    operands: tuple[Pair, ...]
    outputs: tuple[Pair, ...]
    extent: int = 0
    runs_collectives: bool = False
    takes_groups: bool = False
    one_axis: bool = False

    def grouped(self, groups: int) -> Option:
        """The same option on splits of `groups` times as many runs."""

        def pair(old: Pair) -> Pair:
            return split(old.dim, old.groups * groups) if old.is_split else old

        return replace(
            self,
            label=f"{self.label};{groups}",
            operands=tuple(pair(p) for p in self.operands),
            outputs=tuple(pair(p) for p in self.outputs),
            extent=self.extent // groups,
        )


@dataclass(frozen=True, slots=True)
class AxisRef:
    """Argument of a runtime function: the mesh axis; rendered as the axis's handle, None where the axis is absent."""

    name: str


@dataclass(frozen=True, slots=True)
class SeedRef:
    """Argument of a random operation: its seed, drawn from (step, microbatch, operation, coordinates on `axes`).

    `is_of_step`: the microbatches of a step draw alike, for they all hold the same values.
    """

    axes: tuple[str, ...]
    is_of_step: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The local operation: an aten op ("aten.linear.default") or a function of compiler/runtime ("embedding_rows").

    Arguments as in `Node`, but Operand instead of Ref, plus AxisRef and SeedRef. `divide_by` divides the result by a
    constant (means over split dims).
    """

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    divide_by: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What autograd keeps for the backward: operand and output positions, and bytes of masks, statistics and the like.

    `wanted_by`: (kept operand, operand whose gradient needs it); an operand that is in no pair is kept in any case.
    `kernel_bytes`: of `extra_bytes`, what the kernels of the rule make beside the results (log-sum-exps, scores).
    `flattened`: (kept operand, how many last dims stay apart): the dims before these are read as one, and where
    they do not lie so in memory a copy is kept instead.
    """

    operands: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra_bytes: int = 0
    kernel_bytes: int = 0
    wanted_by: tuple[tuple[int, int], ...] = ()
    flattened: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Operand:
    """Argument of a Call: the local tensor at this position of `node.operands`, in the pair the option asks for."""

    position: int


# label by axis name, for the axes of size > 1
Labels = Mapping[str, str]
LocalTypes = Sequence[TensorType]


def _no_collectives(
    node: Node, label: str, axis: str, size: int, operands: LocalTypes, outputs: LocalTypes
) -> tuple[CollectiveUse, ...]:
    return ()


def numbered(node: Node) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The node's arguments with every Ref replaced by its Operand position."""
    position = 0

    def visit(arg: Arg) -> Arg:
        nonlocal position
        if isinstance(arg, Ref):
            position += 1
            return Operand(position - 1)
        if isinstance(arg, tuple):
            return tuple(visit(item) for item in arg)
        return arg

    args = tuple(visit(arg) for arg in node.args)
    return args, tuple((name, visit(arg)) for name, arg in node.kwargs)


def same_call(node: Node, labels: Labels, outputs: LocalTypes, sizes: Mapping[str, int]) -> Call:
    """The operation as it is, on local tensors."""
    args, kwargs = numbered(node)
    return Call(target=node.op, args=args, kwargs=kwargs)


def pointwise_work(node: Node, operands: LocalTypes, outputs: LocalTypes) -> Work:
    """One kernel reads every operand and writes every output once; backward reads the gradient and operands again."""
    read = sum(t.num_bytes for t in operands)
    written = sum(t.num_bytes for t in outputs)
    numel = sum(t.numel for t in outputs)
    wanted = sum(t.num_bytes for t in operands if t.requires_grad)
    backward = Pass(flops=numel, bytes=written + read + wanted, kernels=1) if wanted else Pass()
    return Work(forward=Pass(flops=numel, bytes=read + written, kernels=1), backward=backward, dtype=outputs[0].dtype)


def saves_operands(node: Node) -> Saved:
    """Keeps every operand, the safe upper bound."""
    return Saved(operands=tuple(range(len(node.operands))))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The rule of one family of operations.

    options: the factor options (without none and grad, which every operation has), from shapes alone.
    work: flops, bytes and kernels of one rank, from local types.
    saved: what autograd keeps.
    saved_by: kernels -> what these keep instead, from local types: the function that the local call names, "cpu" or
        "cuda"; looked up in this order.
    collectives: inner collectives of a body for the axis that takes `label`, from local types.
    localise: the local call for the chosen labels; `outputs` are the local types, `sizes` the axis sizes.
    is_random: draws random numbers in training; localise then passes a SeedRef.
    mixes_samples: needs the whole batch at once (batch norm statistics): forces one microbatch.
    kernels: what PyTorch runs below autograd for work whose flops are many for each byte of its result (products,
    attention): selective activation checkpointing keeps the results of these and computes all else again.
    overwrites_products: its own code writes over results of such kernels, which then cannot be kept.
    """

    ops: tuple[str, ...]
    options: Callable[[Node, LocalTypes], tuple[Option, ...]]
    work: Callable[[Node, LocalTypes, LocalTypes], Work] = pointwise_work
    saved: Callable[[Node], Saved] = saves_operands
    saved_by: Mapping[str, Callable[[Node, LocalTypes, Call], Saved]] = field(default_factory=dict)
    collectives: Callable[[Node, str, str, int, LocalTypes, LocalTypes], tuple[CollectiveUse, ...]] = _no_collectives
    localise: Callable[[Node, Labels, LocalTypes, Mapping[str, int]], Call] = same_call
    is_random: bool = False
    mixes_samples: bool = False
    kernels: tuple[str, ...] = ()
    overwrites_products: bool = False


_RULES: dict[str, OpRule] = {}
_FALLBACKS: list[Callable[[str], OpRule | None]] = []


def register(rule: OpRule) -> None:
    """Add a rule.

    Raises:
        ValueError: an operation of the rule already has one.
    """
    for op in rule.ops:
        if op in _RULES:
            raise ValueError(f"{op} has two sharding rules")
        _RULES[op] = rule


def register_fallback(find: Callable[[str], OpRule | None]) -> None:
    """Add a finder for operations without an entry (pointwise by tag, for example); asked in order of registration."""
    _FALLBACKS.append(find)


@cache
def rule_of(op: str) -> OpRule | None:
    """The rule of an operation, None where there is none: it is then computed replicated."""
    if op in _RULES:
        return _RULES[op]
    for find in _FALLBACKS:
        if (rule := find(op)) is not None:
            return rule
    return None


def kept_kernels(op: str) -> tuple[str, ...]:
    """The kernels whose results selective activation checkpointing keeps of an operation; none where it runs again."""
    rule = rule_of(op)
    return () if rule is None else rule.kernels


def saved_of(node: Node, operands: LocalTypes, call: Call | None = None, kernels: str = "cuda") -> Saved:
    """What autograd keeps, knowing which operands have a gradient: `x * mask` keeps the mask alone.

    `call`: how the operation runs on a rank, by `kernels`; without it, what any would keep.
    """
    if not any(value.requires_grad for value in operands):
        return Saved()
    rule = rule_of(node.op)
    if rule is None:
        saved = saves_operands(node)
    elif call is None:
        saved = rule.saved(node)
    else:
        special = rule.saved_by.get(call.target) or rule.saved_by.get(kernels)
        saved = rule.saved(node) if special is None else special(node, operands, call)
    if not saved.wanted_by:
        return saved

    def is_kept(position: int) -> bool:
        wanting = [other for kept, other in saved.wanted_by if kept == position]
        return not wanting or any(operands[other].requires_grad for other in wanting)

    kept = tuple(i for i in saved.operands if is_kept(i))
    return replace(saved, operands=kept, flattened=tuple(item for item in saved.flattened if item[0] in kept))


def registered_ops() -> tuple[str, ...]:
    return tuple(sorted(_RULES))


def ops_holding(text: str) -> tuple[str, ...]:
    """The registered operations whose names hold a text, and those of this name that have a rule without an entry.

    Raises:
        AutoparError: none does; the nearest names.
    """
    full = (text, f"aten.{text}", *(f"{start}{text}.{end}" for start in ("", "aten.") for end in ("default", "Tensor")))
    found = {op for op in registered_ops() if text in op} | {op for op in full if rule_of(op) is not None}
    if found:
        return tuple(sorted(found))
    by_name = {op.split(".")[1]: op for op in registered_ops()}
    wanted = text.removeprefix("aten.").partition(".")[0].lower()
    near = [by_name[name] for name in get_close_matches(wanted, by_name, n=3, cutoff=0.5)]
    raise AutoparError(
        f"no operation with a rule holds {text!r}",
        fix=f"did you mean {' or '.join(near)}?" if near else "`autopar ops` lists them all",
    )


def options_of(node: Node, operands: Sequence[TensorType], groups: frozenset[int] = frozenset()) -> tuple[Option, ...]:
    """Every option of an operation, "none" and "grad" first; `operands` are the global operand types.

    Without a gradient "grad" is the same as "none" and left out. An operation without a rule has only these. Options
    that take groups are followed by their forms for every count in `groups` that divides their extent.
    """
    if node.kind is not Kind.OP:
        raise ValueError(f"{node.name} is no operation")
    count, outs = len(operands), len(node.outputs)
    found = [Option(label="none", operands=(REPLICATED,) * count, outputs=(REPLICATED,) * outs)]
    if any(t.requires_grad for t in node.outputs):
        found.append(Option(label="grad", operands=(SUMMED_GRADIENT,) * count, outputs=(SUMMED_GRADIENT,) * outs))
    rule = rule_of(node.op)
    if rule is not None:
        for option in rule.options(node, operands):
            found.append(option)
            if option.takes_groups:
                found.extend(option.grouped(g) for g in sorted(groups) if g > 1 and option.extent % g == 0)
    return tuple(found)


def plain_label(label: str) -> str:
    """The label without its groups: "d2" for "d2;3"."""
    return label.partition(";")[0]


def label_groups(label: str) -> int:
    """The groups of a label: 3 for "d2;3", 1 for "d2"."""
    _, _, groups = label.partition(";")
    return int(groups) if groups.isdigit() else 1


def interesting_groups(template: Template) -> frozenset[int]:
    """The group counts above one that a template's views make: flattened dims, fused projections, concatenations."""
    found: set[int] = set()
    for node in template.nodes:
        if node.kind is Kind.OP:
            for option in options_of(node, [template.type_of(ref) for ref in node.operands]):
                found.update(p.groups for p in (*option.operands, *option.outputs) if p.is_split and p.groups > 1)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Factor:
    """A dim shared by operands and outputs: position in each (None: lacks it), written once per einsum letter."""

    label: str
    size: int
    operands: tuple[Pair | int | None, ...]
    outputs: tuple[Pair | int | None, ...]
    summed: Pair = field(default=Pair("P/R"))
    takes_groups: bool = True

    def option(self) -> Option:
        def pair(place: Pair | int | None, missing: Pair) -> Pair:
            if place is None:
                return missing
            return place if isinstance(place, Pair) else Pair("S", place)

        return Option(
            label=self.label,
            operands=tuple(pair(p, SUMMED_GRADIENT) for p in self.operands),
            outputs=tuple(pair(p, self.summed) for p in self.outputs),
            extent=self.size,
            takes_groups=self.takes_groups,
        )
