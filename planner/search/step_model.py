"""Joint placements of all axes + a policy -> a linear program of the whole step that no plan can beat.

It prices what `Evaluator` prices, in the same units, each term as it is or from below, so that its optimum is a proven
bound on `Evaluated.step_seconds` of every plan with these stages, ZeRO stage, schedule and recomputation. With integral
x it is also where the exact search finds its next plan (`exact.py`).

Sets, x, e as in `placements_ilp.py`; t templates, u units, s stages, p parameters. Every amount below is linear in x
and e, but for the variables in capitals, which stand for a maximum:

    F_t >= device seconds of t's operations and copies, F_t >= its host seconds            the same for B_t (backward)
                                                                      and R_t (what is computed again before B_t)
    W_g >= price of what consumer k of value g asks for, each k        consumers may share all but the dearest
    f_s = sum_u F_t + communication;  b_s = sum_u B_t + R_t + communication + accumulation of gradients
    T   >= m (f_s + b_s) + fill and drain through the stages before s                      each s
    T   >= fill + (m-1) f_s + drain + (m-1) b_s'                       gpipe, each s, s': all forwards come first
    A   >= prelude + gradients over dp and tp + O_s,  O_s >= optimizer on the device, O_s >= on the host      each s
    K_v >= bytes of v that operation n keeps, each n;  U_s >= parameters of a group;  M_s >= twice a result
    state_s + in flight_s sum_v K_v + U_s + M_s + overhead <= memory of the device         each s

    min T + A   s.t. x a legal placement, every axis of more than one rank splits some operation

Prices of messages grow slower than their size, so a sum of sizes is priced by the chord to the largest it can be.
Without stages (`stages=None`) the rows are summed over all stages: the bound holds for every cut.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import pulp

from ...cost_models.compute import device_seconds, host_seconds
from ...cost_models.memory import COMPUTE_BYTES
from ...cost_models.optimizer import get_optimizer, optimizer_seconds
from ...cost_models.work import Work
from ..capture.graph import ITEM_BYTES, Kind, ModelGraph, Node, Ref, TensorType
from ..schedules import get_schedule
from ..sharding.mesh import Axis
from ..sharding.placement import REPLICATED, SUMMED_GRADIENT, can_split, local_type
from ..sharding.redistribute import changes
from ..sharding.rules import rule_of
from .assignment import Choice, Group, NoAssignment
from .kernels import kept_by_kernels, stack_work
from .placements_ilp import run_solver
from .prices import ACCUMULATED_BYTES, Prices, saved_on_device, slowest_of_nodes
from .problem import Built, Labels, Space, State
from .step_collectives import HeldParameter, held_shape, padded_bytes

_SCALE = 1e6  # the solver sees microseconds
_ADD = "aten.add.Tensor"
_FRAGMENTATION = 0.03
_BYTES_OF_ROUNDING = 64.0
_MIB = float(1 << 20)  # columns of bytes count MiB
_UNSPLIT = ("none", "grad")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationUse:
    """What one option of an operation takes, on one rank in one microbatch."""

    device: tuple[float, float]  # forward, backward
    host: tuple[float, float]
    messages: tuple[float, float]
    kept: tuple[tuple[Ref, int], ...]  # value, bytes
    extra_bytes: int
    result_bytes: int
    is_view: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveUse:
    """What one conversion takes."""

    copies: tuple[float, float] = (0.0, 0.0)
    messages: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All that is decided beside the placements. `stages` None: any cut; `zero` None: any ZeRO stage."""

    stages: tuple[tuple[int, int], ...] | None
    zero: int | None
    schedule: str
    activation_checkpoint: str
    must_fit: bool = True


@dataclass(frozen=True)
class Uses:
    """A `Costs` that charges nothing and writes down what every option and conversion takes."""

    space: Space
    prices: Prices
    operations: dict[tuple[int, str, Labels], OperationUse] = field(default_factory=dict, init=False)
    moves: dict[tuple[TensorType, State, State], MoveUse | None] = field(default_factory=dict, init=False)

    def operation(
        self, template: int, node: Node, labels: Labels, operands: Sequence[TensorType], outputs: Sequence[TensorType]
    ) -> tuple[float, float]:
        gpu, stack = self.prices.cluster.gpu, self.prices.stack
        whole = stack_work(node, operands, outputs, stack)
        work = self._least(template, node, whole)
        priced = replace(stack, fusion="eager")
        forward, backward = 0.0, 0.0
        rule = rule_of(node.op)
        if rule is not None:
            for axis, label in zip(self.prices.axes, labels, strict=True):
                uses = rule.collectives(node, label, axis.name, axis.size, operands, outputs)
                forward += sum(self.prices.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase == "forward")
                backward += sum(
                    self.prices.use_seconds(u.axis, u.op, u.num_bytes) for u in uses if u.phase != "forward"
                )
        kept: list[tuple[Ref, int]] = []
        extra = 0
        if any(value.requires_grad for value in outputs):
            saved = saved_on_device(node, operands, outputs)
            extra = saved.extra_bytes + kept_by_kernels(node, operands, stack)
            kept += [(node.operands[i], operands[i].num_bytes) for i in saved.operands]
            kept += [(Ref(node.name, i), outputs[i].num_bytes) for i in saved.outputs]
        self.operations[template, node.name, labels] = OperationUse(
            device=(
                device_seconds(work.forward, gpu, dtype=work.dtype, stack=priced),
                device_seconds(work.backward, gpu, dtype=work.dtype, stack=priced, is_backward=True),
            ),
            host=(host_seconds(work.forward, gpu, stack=priced), host_seconds(work.backward, gpu, stack=priced)),
            messages=(forward, backward),
            kept=tuple(kept),
            extra_bytes=extra,
            result_bytes=max((value.num_bytes for value in outputs), default=0),
            is_view=not whole.forward.kernels and not whole.forward.bytes,
        )
        return 0.0, 0.0

    def _least(self, template: int, node: Node, work: Work) -> Work:
        """The work where all is fused that a stack may fuse."""
        is_product = bool(work.forward.gemms or work.forward.attention_flops)
        if self.prices.stack.fusion != "eager" and not is_product:
            forward = replace(work.forward, bytes=0, kernels=max(0, work.forward.kernels - 1))
            work = Work(forward=forward, backward=replace(work.backward, bytes=0, kernels=0), dtype=work.dtype)
        if node.op == _ADD and len(node.operands) == 2:
            graph_template = self.space.graph.templates[template]
            source = graph_template.by_name[node.operands[0].node]
            if source.kind is Kind.OP and len(graph_template.type_of(node.operands[1]).shape) == 1:
                return Work(backward=work.backward, dtype=work.dtype)  # perhaps the bias of a product
        return work

    def tensor(self, node: Node, state: State, local: TensorType) -> tuple[float, float]:
        return 0.0, 0.0

    def conversion(self, value: TensorType, source: State, target: State) -> float | None:
        key = (value, source, target)
        if key not in self.moves:
            self.moves[key] = self._move(value, source, target)
        return None if self.moves[key] is None else 0.0

    def _move(self, value: TensorType, source: State, target: State) -> MoveUse | None:
        axes = self.prices.axes
        before, after = _layout(source, axes), _layout(target, axes)
        if not can_split(value, before, axes) or not can_split(value, after, axes):
            return None
        try:
            steps = changes(value, before, after, axes)
        except (KeyError, ValueError):
            return None
        sums = [0.0, 0.0, 0.0, 0.0]
        for step in steps:
            axis = next(axis for axis in axes if axis.name == step.axis)
            if axis.is_time:
                continue
            parts = (*self.prices.copies(step), *self.prices.uses_seconds(step.collectives(axis)))
            sums = [old + new for old, new in zip(sums, parts, strict=True)]
        return MoveUse(copies=(sums[0], sums[1]), messages=(sums[2], sums[3]))


def _layout(state: State, axes: Sequence[Axis]) -> dict[str, object]:
    return {axis.name: pair for axis, pair in zip(axes, state, strict=True)}  # type: ignore[misc]


# A linear expression: column -> factor; None holds the constant.
Linear = dict[pulp.LpVariable | None, float]


def _add(into: Linear, other: Mapping[pulp.LpVariable | None, float], factor: float = 1.0) -> Linear:
    for column, amount in other.items():
        into[column] = into.get(column, 0.0) + factor * amount
    return into


def _sum(parts: Sequence[tuple[Mapping[pulp.LpVariable | None, float], float]]) -> Linear:
    total: Linear = {}
    for part, factor in parts:
        _add(total, part, factor)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitCost:
    forward: Linear
    backward: Linear
    kept_bytes: Linear
    temporary: pulp.LpVariable | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameters:
    """Parameters of a stage, each once: (vertex, template, node) and how many there are of it."""

    counts: Mapping[tuple[int, int, str], int]
    groups: tuple[tuple[tuple[int, int, str], ...], ...]  # distinct FSDP groups


class StepModel:
    """The program of one policy. `forbid` excludes an assignment that was looked at; `solve` may be called again."""

    def __init__(
        self,
        space: Space,
        master: ModelGraph,
        built: Built,
        uses: Uses,
        alive: Sequence[Sequence[int]],
        policy: Policy,
        *,
        optimizer: str,
        precision: str,
    ) -> None:
        self.space, self.master, self.built, self.uses, self.policy = space, master, built, uses, policy
        self.prices, self.mesh = uses.prices, uses.prices.mesh
        self.cluster = self.prices.cluster
        self.optimizer, self.precision = optimizer, precision
        self.slower = slowest_of_nodes(self.mesh, self.cluster)
        self.lp = pulp.LpProblem("step", pulp.LpMinimize)
        self.num_columns = 0
        self.alive = [tuple(ks) for ks in alive]
        self.x: dict[tuple[int, int], pulp.LpVariable | None] = {}
        self.vertex = {key: n for n, keys in enumerate(built.keys) for key in keys}
        self.views = {
            (t, name) for (t, name, _), use in uses.operations.items() if use.is_view
        }  # fmt: skip
        self._add_choices()
        self.wanted: list[list[dict[tuple[State, State], pulp.LpVariable | None]]] = []
        for group in built.problem.groups:
            self.wanted.append(self._add_group(group))
        self._must_split()
        self.objective = self._step()
        constant = self.objective.pop(None, 0.0)
        self.constant = constant
        self.lp.setObjective(pulp.LpAffineExpression(list(self.objective.items())))

    # --- columns and rows ---

    def _column(self, prefix: str, most: float | None = None) -> pulp.LpVariable:
        self.num_columns += 1
        return self.lp.add_variable(f"{prefix}{self.num_columns:06d}", 0, most)

    def _row(self, terms: Mapping[pulp.LpVariable | None, float], sense: int, right: float = 0.0) -> None:
        columns = [(column, factor) for column, factor in terms.items() if column is not None and factor]
        right -= terms.get(None, 0.0)
        if not columns:
            if (sense == pulp.LpConstraintGE and right > 1e-9) or (sense == pulp.LpConstraintLE and right < -1e-9):
                raise NoAssignment
            return
        self.lp.addConstraint(pulp.LpConstraint(pulp.LpAffineExpression(columns), sense, rhs=right))

    def _at_least(self, column: pulp.LpVariable, terms: Linear) -> None:
        self._row(_add({column: 1.0}, terms, -1.0), pulp.LpConstraintGE)

    def _largest(self, prefix: str, parts: Sequence[Linear]) -> Linear:
        """A column that is at least every part; the part itself where there is but one."""
        parts = [part for part in parts if any(part.values())]
        if not parts:
            return {}
        if len(parts) == 1:
            return parts[0]
        column = self._column(prefix)
        for part in parts:
            self._at_least(column, part)
        return {column: 1.0}

    def _add_choices(self) -> None:
        for n, ks in enumerate(self.alive):
            if len(ks) == 1:
                self.x[n, ks[0]] = None
                continue
            columns = [self._column("x", 1) for _ in ks]
            self.x.update(((n, k), column) for k, column in zip(ks, columns, strict=True))
            self._row(dict.fromkeys(columns, 1.0), pulp.LpConstraintEQ, 1.0)

    def _chosen(self, n: int, amount: Callable[[Choice], float]) -> Linear:
        """sum_o amount(o) x[n,o]"""
        choices = self.built.problem.choices[n]
        found: Linear = {}
        for k in self.alive[n]:
            value = amount(choices[k])
            if value:
                _add(found, {self.x[n, k]: value})
        return found

    def _add_group(self, group: Group) -> list[dict[tuple[State, State], pulp.LpVariable | None]]:
        """e[g,k,p,r] by consumer; None where there is no choice."""
        choices = self.built.problem.choices
        producer, output = group.producer
        made: dict[State, list[int]] = {}
        for k in self.alive[producer]:
            made.setdefault(choices[producer][k].outputs[output], []).append(k)
        found = []
        for vertex, position in group.consumers:
            wanted: dict[State, list[int]] = {}
            for k in self.alive[vertex]:
                wanted.setdefault(choices[vertex][k].operands[position], []).append(k)
            edges: dict[tuple[State, State], pulp.LpVariable | None] = {
                (p, r): None for p in made for r in wanted if (p, r) in group.prices
            }
            if not edges:
                raise NoAssignment(self.built.problem.names[vertex])
            if len(made) > 1 or len(wanted) > 1:
                edges = {key: self._column("e", 1) for key in edges}
                for side, states, n in ((0, made, producer), (1, wanted, vertex)):
                    for state, ks in states.items():
                        row: Linear = {column: 1.0 for key, column in edges.items() if key[side] == state}
                        for k in ks:
                            _add(row, {self.x[n, k]: -1.0})
                        self._row(row, pulp.LpConstraintEQ)
            found.append(edges)
        return found

    def _must_split(self) -> None:
        """Every axis of several ranks splits some operation."""
        for position, axis in enumerate(self.built.axes):
            if axis.is_time:
                continue
            row: Linear = {}
            for n, keys in enumerate(self.built.keys):
                t, name = keys[0]
                if t == self.space.prelude or self.space.graph.templates[t].by_name[name].kind is not Kind.OP:
                    continue
                _add(row, self._chosen(n, lambda choice, i=position: float(splits(_labels(choice)[i]))))
            self._row(row, pulp.LpConstraintGE, 1.0)

    # --- units ---

    def _moves(self, index: int, part: Callable[[MoveUse], float], readers: Callable[[int], bool]) -> Linear:
        """What the conversions of a value take at least; `readers` says which consumers count."""
        group = self.built.problem.groups[index]
        value = self._value(group)
        amounts: list[Linear] = []
        for (vertex, _), edges in zip(group.consumers, self.wanted[index], strict=True):
            if not readers(vertex):
                continue
            found: Linear = {}
            for (source, target), column in edges.items():
                use = self.uses.moves.get((value, source, target)) if source != target else None
                if use is not None and part(use):
                    _add(found, {column: part(use)})
            amounts.append(found)
        if len(amounts) > 1 and self._is_one_step(index):
            return self._shared(amounts, index, part, readers)
        return self._largest("W", amounts)

    def _is_one_step(self, index: int) -> bool:
        """Whether no conversion of the group goes over several axes: then equal targets alone are shared."""
        return all(
            sum(p != r for p, r in zip(source, target, strict=True)) <= 1
            for edges in self.wanted[index]
            for source, target in edges
        )  # fmt: skip

    def _shared(
        self, amounts: list[Linear], index: int, part: Callable[[MoveUse], float], readers: Callable[[int], bool]
    ) -> Linear:
        """sum over (made, wanted) of the price, once for all that ask for it."""
        group = self.built.problem.groups[index]
        value = self._value(group)
        by_pair: dict[tuple[State, State], list[Linear]] = {}
        for (vertex, _), edges in zip(group.consumers, self.wanted[index], strict=True):
            if readers(vertex):
                for key, column in edges.items():
                    use = self.uses.moves.get((value, *key)) if key[0] != key[1] else None
                    if use is not None and part(use):
                        by_pair.setdefault(key, []).append({column: part(use)})
        return _sum([(self._largest("z", parts), 1.0) for parts in by_pair.values()])

    def _value(self, group: Group) -> TensorType:
        vertex, output = group.producer
        t, name = self.built.keys[vertex][0]
        return self.space.graph.templates[t].by_name[name].outputs[output]

    def _use(self, t: int, name: str) -> Callable[[Choice], OperationUse]:
        return lambda choice: self.uses.operations[t, name, _labels(choice)]

    def _template(self, t: int, recompute: bool) -> _UnitCost:
        """One unit without its edges."""
        template = self.space.graph.templates[t]
        operations = [node for node in template.nodes if node.kind is Kind.OP]
        inner = [index for index, owner in enumerate(self._owners()) if owner == t]
        again, fed = self._again(t) if recompute else ((), ())

        def every(vertex: int) -> bool:
            return True

        def repeated(vertex: int) -> bool:
            return any(key in fed for key in self.built.keys[vertex])

        def pass_cost(way: int, nodes: Sequence[Node], readers: Callable[[int], bool]) -> tuple[Linear, Linear]:
            device: Linear = {}
            host: Linear = {}
            messages: Linear = {}
            for node in nodes:
                n, use = self.vertex[t, node.name], self._use(t, node.name)
                _add(device, self._chosen(n, lambda c, use=use: use(c).device[way] * _SCALE))
                _add(host, self._chosen(n, lambda c, use=use: use(c).host[way] * _SCALE))
                _add(messages, self._chosen(n, lambda c, use=use: use(c).messages[way] * _SCALE))
            for index in inner:
                _add(device, self._moves(index, lambda use: use.copies[way] * _SCALE, readers))
                _add(messages, self._moves(index, lambda use: use.messages[way] * _SCALE, readers))
            return self._largest("C", (device, host)), messages

        ahead, sent = pass_cost(0, operations, every)
        back, returned = pass_cost(1, operations, every)
        forward = _sum([(ahead, 1.0), (sent, 1.0)])
        backward = _sum([(back, 1.0), (returned, 1.0)])
        kept = self._kept(t, operations)
        results = [self._results_bytes(t, node.name) for node in operations]
        temporary = results
        if recompute:
            nodes = [node for node in operations if (t, node.name) in again]
            ahead, sent = pass_cost(0, nodes, repeated)
            backward = _sum([(backward, 1.0), (ahead, 1.0), (sent, 1.0)])
            temporary = [_sum([(result, 1.0), (kept, 1.0)]) for result in results] or [kept]
            kept = self._inputs_bytes(t)
        column = self._column("M")
        for part in temporary:
            self._at_least(column, _scaled(part, 1 / _MIB))
        return _UnitCost(forward=forward, backward=backward, kept_bytes=kept, temporary=column)

    def _results_bytes(self, t: int, name: str) -> Linear:
        """Twice the largest result, as the evaluation takes an operation's scratch to be."""
        use = self._use(t, name)
        return self._chosen(self.vertex[t, name], lambda choice: 2.0 * use(choice).result_bytes)

    def _owners(self) -> list[int]:
        """The template of every group that lies inside one; -1 for edges between units."""
        groups = self.built.problem.groups
        inside = len(groups) - len(self.space.edges)
        owners = []
        for index, group in enumerate(groups):
            keys = [self.built.keys[n] for n, _ in group.consumers]
            owners.append(keys[0][0][0] if index < inside else -1)
        return owners

    def _again(self, t: int) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
        """Operations that run again, and those whose conversions do: all, or those up to the last that keeps something.

        An operand is kept before its operation runs, so that one need not run itself.
        """
        template = self.space.graph.templates[t]
        keys = tuple((t, node.name) for node in template.nodes if node.kind is Kind.OP)
        if self.prices.stack.recompute != "until last saved":
            return keys, keys
        run = fed = 0
        for index, (_, name) in enumerate(keys):
            node = template.by_name[name]
            if not any(value.requires_grad for value in node.outputs):
                continue
            saved = saved_on_device(node, [template.type_of(ref) for ref in node.operands], node.outputs)
            if saved.outputs or saved.extra_bytes:
                run = fed = index + 1
            elif saved.operands:
                run, fed = index, index + 1
        return keys[:run], keys[:fed]

    def _root(self, t: int, ref: Ref) -> Ref:
        template = self.space.graph.templates[t]
        node = template.by_name[ref.node]
        while (t, node.name) in self.views and node.operands:
            ref = node.operands[0]
            node = template.by_name[ref.node]
        return ref

    def _kept(self, t: int, operations: Sequence[Node]) -> Linear:
        """Bytes that autograd keeps: every value once, however many keep it."""
        template = self.space.graph.templates[t]
        by_root: dict[Ref, list[Linear]] = {}
        extra: Linear = {}
        for node in operations:
            n, use = self.vertex[t, node.name], self._use(t, node.name)
            _add(extra, self._chosen(n, lambda c, use=use: float(use(c).extra_bytes)))
            refs = {ref for k in self.alive[n] for ref, _ in use(self.built.problem.choices[n][k]).kept}
            for ref in sorted(refs, key=lambda ref: (ref.node, ref.index)):
                root = self._root(t, ref)
                kind = template.by_name[root.node].kind
                if kind is not Kind.OP and not (kind is Kind.INPUT and template.type_of(root).requires_grad):
                    continue

                def size(choice: Choice, use: Callable[[Choice], OperationUse] = use, ref: Ref = ref) -> float:
                    return max((float(b) for r, b in use(choice).kept if r == ref), default=0.0)

                by_root.setdefault(root, []).append(self._chosen(n, size))
        parts = [(_scaled(extra, 1 / _MIB), _MIB)]
        for amounts in by_root.values():
            parts.append((self._largest("K", [_scaled(amount, 1 / _MIB) for amount in amounts]), _MIB))
        return _sum(parts)

    def _inputs_bytes(self, t: int) -> Linear:
        template = self.space.graph.templates[t]
        found: Linear = {}
        for node in template.of_kind(Kind.INPUT):
            if node.output.requires_grad:
                _add(found, self._chosen(self.vertex[t, node.name], lambda c, v=node.output: self._local(v, c)))
        return found

    def _local(self, value: TensorType, choice: Choice, output: int = 0) -> float:
        state = choice.outputs[output]
        assert isinstance(state, tuple)
        return float(local_type(value, _layout(state, self.built.axes), self.built.axes).num_bytes)  # type: ignore[arg-type]

    # --- parameters ---

    def _parameters(self, first: int, last: int) -> _Parameters:
        graph = self.space.graph
        counts: Counter[tuple[int, int, str]] = Counter()
        groups: dict[tuple[object, ...], None] = {}
        seen: set[str] = set()
        by_group: dict[str, list[tuple[int, int, str]]] = {}
        for index in range(max(first, 1), last):
            unit = graph.units[index]
            template = graph.templates[unit.template]
            for name, fqn in unit.tensors:
                if template.by_name[name].kind is not Kind.PARAMETER or fqn in seen:
                    continue
                seen.add(fqn)
                key = (self.vertex[unit.template, name], unit.template, name)
                counts[key] += 1
                by_group.setdefault(unit.fqn if template.is_module else "", []).append(key)
        for members in by_group.values():
            groups.setdefault(tuple(members))
        return _Parameters(counts=counts, groups=tuple(groups))  # type: ignore[arg-type]

    def _held(self, key: tuple[int, int, str], choice: Choice, master: bool) -> HeldParameter:
        _, t, name = key
        graph = self.master if master else self.space.graph
        node = graph.templates[t].by_name[name]
        state = choice.outputs[0]
        assert isinstance(state, tuple)
        layout = _layout(state, self.built.axes)
        pair = layout.get("tp", REPLICATED)
        partial = frozenset(a for a in ("dp", "tp") if layout.get(a) == SUMMED_GRADIENT and node.output.requires_grad)
        return HeldParameter(
            fqn=name,
            shape=held_shape(node.output, pair, self.mesh.tp),  # type: ignore[arg-type]
            dtype=node.output.dtype,
            trainable=node.output.requires_grad,
            partial=partial,
            group="",
        )

    def _bytes(self, key: tuple[int, int, str], amount: Callable[[HeldParameter], float], *, master: bool) -> Linear:
        return self._chosen(key[0], lambda choice: amount(self._held(key, choice, master)))

    def _trained(self, key: tuple[int, int, str]) -> Linear:
        return self._bytes(key, lambda held: _size(held) if held.trainable else 0.0, master=True)

    def _total(self, parameters: _Parameters, amount: Callable[[HeldParameter], float], *, master: bool) -> Linear:
        return _sum([(self._bytes(key, amount, master=master), count) for key, count in parameters.counts.items()])

    def _chord(self, terms: Linear, seconds: Callable[[int], float]) -> Linear:
        """A price of a sum of bytes from below: the line to the largest it can be."""
        most = self._largest_sum(terms)
        return {} if most <= 0 else _scaled(terms, seconds(int(most)) * _SCALE / most)

    def _largest_sum(self, terms: Linear) -> float:
        """The largest value of a sum over choices, of which each vertex takes one."""
        best: dict[int, float] = {}
        total = terms.get(None, 0.0)
        vertex_of = {column: n for (n, _), column in self.x.items() if column is not None}
        for column, amount in terms.items():
            if column is not None:
                n = vertex_of[column]
                best[n] = max(best.get(n, 0.0), amount)
        return total + sum(best.values())

    # --- the step ---

    def _step(self) -> Linear:
        recompute = self.policy.activation_checkpoint == "full"
        self.units: dict[int, _UnitCost] = {}
        for t, template in enumerate(self.space.graph.templates):
            self.units[t] = self._template(t, recompute and template.is_module)
        self.edges = self._edge_costs()
        if self.policy.stages is None:
            return self._any_cut()
        return self._with_stages(self.policy.stages)

    def _edge_costs(self) -> dict[tuple[int, int, int, str], tuple[Linear, Linear]]:
        found = {}
        offset = len(self.built.problem.groups) - len(self.space.edges)
        for position, edge in enumerate(self.space.edges):
            ways = []
            for way in (0, 1):
                index = offset + position
                copies = self._moves(index, lambda use: use.copies[way] * _SCALE, lambda vertex: True)  # noqa: B023
                sent = self._moves(index, lambda use: use.messages[way] * _SCALE, lambda vertex: True)  # noqa: B023
                ways.append(_sum([(copies, 1.0), (sent, 1.0)]))
            found[edge.source, edge.output, edge.target, edge.node] = (ways[0], ways[1])
        return found

    def _unit_edges(self, index: int) -> Iterator[tuple[int, int, int, str]]:
        unit = self.space.graph.units[index]
        inputs = self.space.graph.templates[unit.template].of_kind(Kind.INPUT)
        for node, value in zip(inputs, unit.inputs, strict=False):
            yield self.space.graph.units[value.unit].template, value.output, unit.template, node.name

    def _run(self, first: int, last: int) -> tuple[Linear, Linear, Linear]:
        """Forward and backward of one microbatch through a range of units, and what of the prelude runs once a step."""
        forward: Linear = {}
        backward: Linear = {}
        counts: Counter[int] = Counter()
        edges: Counter[tuple[int, int, int, str]] = Counter()
        for index in range(max(first, 1), last):
            counts[self.space.graph.units[index].template] += 1
            edges.update(self._unit_edges(index))
        for t, count in counts.items():
            _add(forward, self.units[t].forward, count)
            _add(backward, self.units[t].backward, count)
        prepared: dict[tuple[int, int], list[Linear]] = {}
        for key, count in edges.items():
            ahead, back = self.edges[key]
            if key[0] == self.space.prelude:
                prepared.setdefault(key[:2], []).append(ahead)
                continue
            _add(forward, ahead, count)
            _add(backward, back, count)
        once = _sum([(self._largest("P", parts), 1.0) for parts in prepared.values()])
        _add(once, self.units[self.space.prelude].forward)
        return forward, backward, once

    def _after(self, parameters: _Parameters, tensors: int) -> tuple[Linear, Linear]:
        """(accumulation in each microbatch, gradients and optimizer once a step), at least."""
        mesh, price, stack, gpu = self.mesh, self.prices.use_seconds, self.prices.stack, self.cluster.gpu
        shards = self._shards()
        accumulation: Linear = {}
        if mesh.microbatches > 1 and not (shards > 1 and stack.accumulation == "sharded"):
            numel = self._total(parameters, lambda p: float(prod(p.shape)) if p.trainable else 0.0, master=False)
            per_item = ACCUMULATED_BYTES[stack.gradient_dtype] / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
            accumulation = _scaled(numel, per_item * _SCALE)
        once: Linear = {}
        if self.policy.zero is None:
            pass  # some stage may hide what others show
        elif mesh.dp > 1 and shards == 1 and stack.gradient_sync == "exposed":
            trained = self._total(parameters, lambda p: _size(p) if p.trainable else 0.0, master=False)
            _add(once, self._chord(trained, lambda size: price("dp", "all_reduce", size)))
        elif shards > 1:
            _add(once, self._largest("D", [self._exposed(members) for members in parameters.groups]))
        if mesh.tp > 1:
            partial = self._total(parameters, lambda p: _size(p) if "tp" in p.partial else 0.0, master=False)
            _add(once, self._chord(partial, lambda size: price("tp", "all_reduce", size // shards)))
        stored = self._total(parameters, lambda p: _size(p) if p.trainable else 0.0, master=True)
        probe = 1 << 30
        rate = optimizer_seconds(probe, gpu, optimizer=self.optimizer) / probe
        device = _add(_scaled(stored, rate / shards * _SCALE), {None: -rate * _SCALE})
        host: Linear = {None: optimizer_seconds(0, gpu, optimizer=self.optimizer, num_tensors=tensors) * _SCALE}
        _add(once, self._largest("O", (device, host)))
        return accumulation, once

    def _exposed(self, members: Sequence[tuple[int, int, str]]) -> Linear:
        """Gather and reduction of one FSDP group, which nothing hides if it is the largest."""
        shards = self.mesh.dp // self.prices.replicas

        def both(size: int) -> float:
            return self.prices.use_seconds("shard", "all_gather", size) + self.prices.use_seconds(
                "shard", "reduce_scatter", size
            )

        def padded(held: HeldParameter) -> float:
            return float(padded_bytes(held, shards)) if held.trainable else 0.0

        if len(members) == 1:
            return self._bytes(members[0], lambda held: both(int(padded(held))) * _SCALE, master=False)
        return self._chord(_sum([(self._bytes(key, padded, master=False), 1.0) for key in members]), both)

    def _num_tensors(self, parameters: _Parameters) -> int:
        graph = self.space.graph
        return sum(
            count
            for (_, t, name), count in parameters.counts.items()
            if graph.templates[t].by_name[name].output.requires_grad
        )  # fmt: skip

    def _with_stages(self, stages: Sequence[tuple[int, int]]) -> Linear:
        times = self.mesh.microbatches
        forwards: list[Linear] = []
        backwards: list[Linear] = []
        afters: list[Linear] = []
        sends = [self._send(last, s) for s, (_, last) in enumerate(stages[:-1])]
        for s, (first, last) in enumerate(stages):
            forward, backward, prepared = self._run(first, last)
            parameters = self._parameters(first, last)
            accumulation, once = self._after(parameters, self._num_tensors(parameters))
            forwards.append(forward)
            backwards.append(_add(backward, accumulation))
            afters.append(_add(once, prepared))
            in_flight = get_schedule(self.policy.schedule).in_flight(s, len(stages), times)
            self._memory_row(first, last, parameters, float(in_flight), 1)
        paths: list[Linear] = []
        for s in range(len(stages)):
            path = _sum([(forwards[s], times), (backwards[s], times)])
            for before in range(s):
                _add(path, forwards[before])
                _add(path, backwards[before])
                _add(path, sends[before], 2.0)
            paths.append(path)
        if self.policy.schedule == "gpipe":
            through = _sum([(part, 1.0) for part in (*forwards, *backwards)])
            for send in sends:
                _add(through, send, 2.0)
            for one in forwards:
                for other in backwards:
                    paths.append(_sum([(through, 1.0), (one, times - 1), (other, times - 1)]))
        total = self._largest("T", paths)
        return _sum([(total, 1.0), (self._largest("A", afters), 1.0)])

    def _any_cut(self) -> Linear:
        times, pp = self.mesh.microbatches, self.mesh.pp
        last = len(self.space.graph.units)
        forward, backward, prepared = self._run(0, last)
        parameters = self._parameters(0, last)
        accumulation, once = self._after(parameters, self._num_tensors(parameters))
        through = _sum([(forward, 1.0), (backward, 1.0), (accumulation, 1.0)])
        self._memory_row(0, last, parameters, 1.0, pp)
        # Of a pipeline only the optimizer's share of the fullest stage is certain.
        after = once if pp == 1 else self._optimizer_share(parameters)
        return _sum([(through, 1 + (times - 1) / pp), (after, 1.0), (prepared, 1 / pp)])

    def _shards(self) -> int:
        """Ranks that share the optimizer's work, at most."""
        return self.mesh.dp if self.policy.zero is None or self.policy.zero >= 2 else 1

    def _optimizer_share(self, parameters: _Parameters) -> Linear:
        shards = self._shards()
        probe = 1 << 30
        rate = optimizer_seconds(probe, self.cluster.gpu, optimizer=self.optimizer) / probe
        stored = self._total(parameters, lambda p: _size(p) if p.trainable else 0.0, master=True)
        return _scaled(stored, rate * _SCALE / shards / self.mesh.pp)

    def _send(self, boundary: int, edge: int) -> Linear:
        graph = self.space.graph
        crossing = {
            value for unit in graph.units[boundary:] for value in unit.inputs if 0 < value.unit < boundary
        }  # fmt: skip
        if self.prices.stack.pipeline_messages != "whole":
            return {}
        found: Linear = {}
        for value in sorted(crossing, key=lambda value: (value.unit, value.output)):
            t = graph.units[value.unit].template
            ref = graph.templates[t].outputs[value.output]
            kind = graph.type_of(value)

            def seconds(choice: Choice, kind: TensorType = kind, ref: Ref = ref) -> float:
                return _SCALE * self.prices.send_seconds(int(self._local(kind, choice, ref.index)), edge)

            _add(found, self._chosen(self.vertex[t, ref.node], seconds))
        return found

    # --- memory ---

    def _memory_row(self, first: int, last: int, parameters: _Parameters, in_flight: float, devices: int) -> None:
        """What a stage (or all of them together) needs at least, on `devices` devices."""
        gpu, mesh, zero = self.cluster.gpu, self.mesh, self.policy.zero
        if zero is None or not self.policy.must_fit:
            return
        states = get_optimizer(self.optimizer).states
        compute = COMPUTE_BYTES[self.precision] / 4
        is_mixed = compute < 1
        stored = self._total(parameters, lambda p: _size(p) if p.trainable else 0.0, master=True)
        frozen = self._total(parameters, lambda p: 0.0 if p.trainable else _size(p), master=True)
        is_split = zero >= 2 and mesh.dp > 1
        part = 1 / mesh.dp if is_split else 1.0
        moving: Linear = {}
        if is_split:
            if mesh.microbatches > 1:
                held = self._total(parameters, lambda p: _padded(p, mesh.dp), master=False)
                unreduced = self._total(parameters, lambda p: _padded(p, mesh.dp) if p.trainable else 0.0, master=False)
                moving = _sum([(held, 1.0), (unreduced, 1.0)])
            elif devices == 1:
                sizes = [_sum([(self._trained(key), 1 / _MIB) for key in members]) for members in parameters.groups]
                unit = _scaled(self._largest("U", sizes), _MIB)
                moving = _scaled(unit, compute + (1 if is_mixed else 0))
                _add(moving, stored if zero == 2 else unit, compute)
        # Parameters, gradients and the optimizer's states; mixed precision keeps a copy unless FSDP gathers in it.
        total = _scaled(stored, (2 + states) * part)
        if is_mixed and not is_split:
            _add(total, stored, compute)
        _add(total, frozen)
        counts = Counter(self.space.graph.units[index].template for index in range(max(first, 1), last))
        for t, count in counts.items():
            _add(moving, self.units[t].kept_bytes, in_flight * count)
        if devices == 1:
            temporaries = [{self.units[t].temporary: 1.0} for t in counts if self.units[t].temporary is not None]
            _add(moving, _scaled(self._largest("M", temporaries), _MIB))
        _add(total, moving, 1 + _FRAGMENTATION)
        room = devices * (gpu.hbm_bytes - gpu.overhead_bytes + _BYTES_OF_ROUNDING)
        self._row(_scaled(total, 1 / gpu.hbm_bytes), pulp.LpConstraintLE, room / gpu.hbm_bytes)

    # --- answers ---

    def forbid(self, chosen: Sequence[int]) -> None:
        """Exclude one assignment."""
        row: Linear = {}
        for n, k in enumerate(chosen):
            _add(row, {self.x[n, k]: 1.0})
        self._row(row, pulp.LpConstraintLE, len(chosen) - 1.0)

    def solve(self, *, as_mip: bool, time_limit_seconds: float | None = None) -> tuple[float, tuple[int, ...] | None]:
        """(bound in seconds, assignment); without an assignment where it is a relaxation that came out fractional.

        Raises:
            NoAssignment: the policy has no plan.
        """
        for column in self.x.values():
            if column is not None:
                column.cat = pulp.LpInteger if as_mip else pulp.LpContinuous
        bound = self.constant
        if self.num_columns:
            run_solver(self.lp, as_mip=as_mip, time_limit_seconds=time_limit_seconds)
            bound += pulp.value(self.lp.objective) or 0.0
        chosen: list[int] = []
        for n, ks in enumerate(self.alive):
            values = [1.0 if self.x[n, k] is None else float(self.x[n, k].varValue or 0.0) for k in ks]  # type: ignore[union-attr]
            best = max(range(len(ks)), key=lambda i: values[i])
            if not as_mip and values[best] < 1 - 1e-6:
                return bound / _SCALE * self.slower, None
            chosen.append(ks[best])
        return bound / _SCALE * self.slower, tuple(chosen)


def splits(label: str) -> bool:
    """Whether an option's label names a factor that is split."""
    return label not in _UNSPLIT and not label.startswith("partial")


def _labels(choice: Choice) -> Labels:
    assert isinstance(choice.label, tuple)
    return choice.label


def _scaled(terms: Linear, factor: float) -> Linear:
    return {column: amount * factor for column, amount in terms.items()}


def _size(held: HeldParameter) -> float:
    return float(prod(held.shape) * ITEM_BYTES[held.dtype])


def _padded(held: HeldParameter, dp: int) -> float:
    return float(padded_bytes(held, dp))
