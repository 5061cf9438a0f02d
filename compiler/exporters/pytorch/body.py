"""A template's local program as statements: calls, conversions with their comment, biases fused back into products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ....planner.capture.graph import Ref, TensorType
from ....planner.errors import AutoparError
from ....planner.search.step_collectives import saves
from ....planner.sharding.mesh import MICROBATCH, Axis
from ....planner.sharding.placement import Layout, Pair, local_groups
from ....planner.sharding.program import Compute, Convert, TemplateProgram, Var
from ....planner.sharding.redistribute import Change
from ....planner.sharding.rules import Call, Operand, SeedRef
from ...source import Expr, Key, Statement
from ...text import quote
from .naming import value_names
from .operations import Context, render

FUSED = ("linear", "conv1d", "conv2d", "conv3d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where the statements of a template will stand. `key` tells its values from other units' in the function."""

    axes: Sequence[Axis]
    handles: Mapping[str, str]  # axis name -> source of its DeviceMesh
    batch_size: int
    key: Callable[[Var], Key]
    operation_number: str = ""  # source of the number that tells the unit's random operations from other units'
    what: str = ""  # FQN of the unit, for messages
    has_any_size: bool = False  # how many samples there are differs between dp ranks


def statements(program: TemplateProgram, scope: Scope, *, wanted: Iterable[Var] | None = None) -> list[Statement]:
    """The steps that `wanted` (default: the outputs) depend on, in program order."""
    steps = _needed(program, set(program.outputs if wanted is None else wanted))
    names = value_names(program.template)
    reads = _reads(steps, program.outputs)
    fused = _fusions(steps, reads)
    skipped = {position for parts in fused.values() for position in parts}
    found: list[Statement] = []
    random_operations = 0
    for position, step in enumerate(steps):
        if position in skipped:
            continue
        if isinstance(step, Convert):
            name = converted_name(names[step.source.ref], step.change, is_kept=reads[step.source] > 1)
            found.append(convert(step, scope, name))
            continue
        if any(isinstance(arg, SeedRef) for arg in (*step.call.args, *(value for _, value in step.call.kwargs))):
            random_operations += 1
        if position in fused:
            step = _with_bias(step, [steps[index] for index in fused[position]])
        found.append(_operation(step, scope, names, random_operations))
    return found


def _needed(program: TemplateProgram, wanted: set[Var]) -> list[Convert | Compute]:
    """Dead code left out. Operations with side effects (running statistics) have live results anyway."""
    found: list[Convert | Compute] = []
    for step in reversed(program.steps):
        results = (step.target,) if isinstance(step, Convert) else step.results
        if wanted.intersection(results):
            wanted.update((step.source,) if isinstance(step, Convert) else step.operands)
            found.append(step)
    return found[::-1]


def updates(program: TemplateProgram) -> dict[str, Var]:
    """Buffer node -> the value that it gets after the step.

    Raises:
        AutoparError: a value that no rank has whole.
    """
    found: dict[str, Var] = {}
    for name, ref in program.template.buffer_updates:
        made = [v for step in program.steps if isinstance(step, Compute) for v in step.results if v.ref == ref]
        if not made or made[0].pairs:
            raise AutoparError(
                f"buffer {name} of {program.template.name} is updated with a value that no rank has whole",
                fix="place the operation that makes it as R on every axis",
            )
        found[name] = made[0]
    return found


def update_statement(found: Sequence[tuple[str, Key]]) -> Statement:
    """`self.updated = {"num_batches_tracked": ...}`, copied into the buffers at the end of the step."""

    def write(operands: Sequence[Expr]) -> Expr:
        pairs = ", ".join(f"{quote(name)}: {value.text}" for (name, _), value in zip(found, operands, strict=True))
        return Expr(f"self.updated = {{{pairs}}}")

    return Statement(results=(), operands=tuple(key for _, key in found), render=write, names=())


def _reads(steps: Sequence[Convert | Compute], outputs: Sequence[Var]) -> dict[Var, int]:
    counts: dict[Var, int] = {}
    for var in (*(v for s in steps for v in ((s.source,) if isinstance(s, Convert) else s.operands)), *outputs):
        counts[var] = counts.get(var, 0) + 1
    return counts


def converted_name(name: str, change: Change, *, is_kept: bool) -> str:
    """A value keeps its name through a conversion, unless the original is still needed."""
    if not is_kept:
        return name
    if not change.conversion.forward:
        return f"{name}_again"
    return f"{name}_{'part' if change.target.is_split else 'sum' if change.target.kind == 'P/R' else 'full'}"


def convert(step: Convert, scope: Scope, name: str) -> Statement:
    return conversion_statement(
        step.change, step.source.layout, scope, source=scope.key(step.source), target=scope.key(step.target), name=name
    )


def conversion_statement(
    change: Change, before: Layout, scope: Scope, *, source: Key, target: Key, name: str
) -> Statement:
    """One conversion on one axis; `before` is the whole layout of the source."""
    if change.axis == MICROBATCH:
        raise AutoparError(
            f"a conversion on the microbatch axis inside {scope.what or 'a block'}", fix="use one microbatch"
        )
    arguments = conversion_arguments(change, before, scope.axes, scope.handles[change.axis])
    after = {**before, change.axis: change.target}
    if scope.has_any_size and change.target.groups > 1 and (groups := local_groups(after, change.axis, scope.axes)) > 1:
        dim, length = change.target.dim, change.before.shape[change.target.dim] // groups

        def count(operands: Sequence[Expr]) -> Expr:
            value, more = operands[0].text, f"groups={operands[1].text}.size({dim}) // {length}"
            return Expr(f"{change.conversion.function}({', '.join((value, *arguments[:-1], more))})", weight=1)

        return Statement(
            results=(target,), operands=(source, source), render=count, names=(name,), comment=pairs_comment(change),
            communicates=_communicates(change),
        )  # fmt: skip

    def write(operands: Sequence[Expr]) -> Expr:
        return Expr(f"{change.conversion.function}({', '.join((operands[0].text, *arguments))})", weight=1)

    return Statement(
        results=(target,), operands=(source,), render=write, names=(name,), comment=pairs_comment(change),
        communicates=_communicates(change),
    )  # fmt: skip


def _communicates(change: Change) -> bool:
    """Whether the forward of a conversion is a collective: local ones are in brackets."""
    return bool(change.conversion.forward) and not change.conversion.forward.startswith("[")


def conversion_arguments(change: Change, before: Layout, axes: Sequence[Axis], handle: str) -> tuple[str, ...]:
    """What the runtime function takes behind the tensor: dims, axis, groups where there are several."""
    after = {**before, change.axis: change.target}
    splits = [(pair, layout) for pair, layout in ((change.source, before), (change.target, after)) if pair.is_split]
    groups = [local_groups(layout, change.axis, axes) for _, layout in splits]
    names = ("groups",) if len(splits) == 1 else ("groups", "to_groups")
    more = tuple(f"{name}={count}" for name, count in zip(names, groups, strict=False) if count > 1)
    return (*(str(pair.dim) for pair, _ in splits), handle, *more)


def pairs_comment(change: Change) -> str:
    """`S(1) -> R / reduce_scatter`: the placement before and after, and what happens to the gradient."""
    forward = f"{forward_pair(change.source)} -> {forward_pair(change.target)}"
    return f"{forward} / {change.conversion.backward or 'nothing'}" if change.before.requires_grad else forward


def forward_pair(pair: Pair) -> str:
    return str(pair) if pair.is_split else pair.kind[0]


def _operation(step: Compute, scope: Scope, names: Mapping[Ref, str], number: int) -> Statement:
    context = Context(
        axes=scope.handles,
        seed=lambda ref: _seed(ref, scope, number),
        free_dims=_free_dims(step, scope),
    )
    return Statement(
        results=tuple(scope.key(result) for result in step.results),
        operands=tuple(scope.key(operand) for operand in step.operands),
        render=lambda operands: render(step.call, operands, context),
        names=tuple(names[result.ref] for result in step.results),
        inline=not step.call.kwargs or step.call.target.startswith("aten."),
        communicates=any(use.phase == "forward" for use in step.collectives),
        saves=saves(step),
    )


def _seed(ref: SeedRef, scope: Scope, number: int) -> str:
    coordinates = [f"{scope.handles[axis]}.get_local_rank()" for axis in ref.axes if axis in scope.handles]
    where = f", ({', '.join(coordinates)}{',' if len(coordinates) == 1 else ''})" if coordinates else ""
    first = scope.operation_number or "0"
    operation = str(int(first) + number) if first.isdecimal() else f"{first} + {number}"
    return f"seed_of({'at[0], 0' if ref.is_of_step else '*at'}, {operation}{where})"


def _free_dims(step: Compute, scope: Scope) -> tuple[int, ...]:
    """Dims that a split of the batch makes shorter; without any split, dim 0 if it holds the samples."""
    layout = step.results[0].layout
    dims = {layout[axis].dim for axis in ("dp", MICROBATCH) if axis in layout and layout[axis].is_split}
    shape = step.node.output.shape
    if not dims and not scope.handles.get("dp") and shape and shape[0] % scope.batch_size == 0:
        dims = {0}
    return tuple(sorted(dims))


def _fusions(steps: Sequence[Convert | Compute], reads: Mapping[Var, int]) -> dict[int, tuple[int, ...]]:
    """Position of an addition -> positions of the product (and the bias's reshape) that it is written together with."""
    makers = {
        result: position
        for position, step in enumerate(steps)
        if isinstance(step, Compute)
        for result in step.results
    }  # fmt: skip
    found: dict[int, tuple[int, ...]] = {}
    for position, step in enumerate(steps):
        if not isinstance(step, Compute) or step.call.target != "aten.add.Tensor" or step.call.kwargs:
            continue
        if step.call.args != (Operand(0), Operand(1)):
            continue
        product, bias = makers.get(step.operands[0]), step.operands[1]
        if product is None or reads[step.operands[0]] != 1 or not _takes_bias(steps[product]):
            continue
        made = makers.get(bias)
        types = step.operand_types[1]
        if _is_linear(steps[product]):
            if len(types.shape) == 1:
                found[position] = (product,)
        elif made is not None and reads[bias] == 1 and _is_channel_bias(steps[made], types):
            found[position] = (product, made)
    return found


def _operation_name(step: Convert | Compute) -> str:
    parts = step.call.target.split(".") if isinstance(step, Compute) else [""]
    return parts[1] if parts[0] == "aten" else ""


def _takes_bias(step: Convert | Compute) -> bool:
    if _operation_name(step) not in FUSED or not isinstance(step, Compute) or step.call.divide_by != 1:
        return False
    return len(step.call.args) < 3 or step.call.args[2] is None


def _is_linear(step: Convert | Compute) -> bool:
    return _operation_name(step) == "linear"


def _is_channel_bias(step: Convert | Compute, reshaped: TensorType) -> bool:
    if _operation_name(step) not in ("reshape", "view") or not isinstance(step, Compute):
        return False
    sizes = step.operand_types[0].shape
    return len(sizes) == 1 and reshaped.shape[0] == sizes[0] and all(size == 1 for size in reshaped.shape[1:])


def _with_bias(add: Compute, parts: Sequence[Convert | Compute]) -> Compute:
    product = parts[0]
    assert isinstance(product, Compute)
    bias = add.operands[1]
    if len(parts) > 1 and isinstance(parts[1], Compute):
        bias = parts[1].operands[0]
    args = (*product.call.args[:2], Operand(len(product.operands)), *product.call.args[3:])
    call = Call(target=product.call.target, args=args, kwargs=product.call.kwargs)
    return replace(add, call=call, operands=(*product.operands, bias))
