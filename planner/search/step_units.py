"""Columns of a step -> seconds and bytes of each template in one microbatch, linear in them, as they are or from below.

For templates t, values g that consumers k ask for, values v that operations n keep:

    F_t >= device seconds of t's operations and copies, F_t >= its host seconds            the same for B_t (backward)
                                                                      and R_t (what is computed again before B_t)
    W_g >= price of what consumer k of value g asks for, each k        consumers may share all but the dearest
    K_v >= bytes of v that operation n keeps, each n;  M_t >= twice a result of t
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import pulp

from ..capture.graph import Kind, Node, Ref
from ..sharding.rules import kept_kernels
from .linear import Linear, add, scaled, sum_of
from .prices import saved_on_device
from .problem import State
from .step_columns import MIB, SCALE, StepColumns
from .step_uses import MoveUse, OperationUse, Uses, labels_of


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTerms:
    forward: Linear
    backward: Linear
    host_forward: Linear
    host_backward: Linear
    kept_bytes: Linear
    temporary: pulp.LpVariable | None


class _Move(NamedTuple):
    """A conversion from made to wanted, and what it takes."""

    pair: tuple[State, State]
    column: pulp.LpVariable | None
    use: MoveUse


class _Moves(NamedTuple):
    """The conversions of a value by consumer. `are_one_step`: whether none goes over several axes."""

    by_consumer: list[tuple[int, list[_Move]]]
    are_one_step: bool


class StepUnits:
    """What units take, without their edges (`template`), and what the edges between them take (`edges`)."""

    def __init__(self, columns: StepColumns, uses: Uses) -> None:
        self.columns, self.space, self.built = columns, columns.space, columns.built
        self.uses, self.prices = uses, uses.prices
        self.views = {
            (t, name) for (t, name, _), use in uses.operations.items() if use.is_view
        }  # fmt: skip
        self._keepables: dict[int, frozenset[Ref]] = {}
        self._uses_of: dict[int, list[OperationUse]] = {}
        self._moves_of: dict[int, _Moves] = {}

    def template(self, t: int, recompute: str, *, is_mixed: bool = False) -> UnitTerms:
        """One unit without its edges. `recompute`: "none", "selective" or "full"; `is_mixed`: others have another."""
        template = self.space.graph.templates[t]
        operations = [node for node in template.nodes if node.kind is Kind.OP]
        inner = self._inner[t]
        again, fed = self._again(t) if recompute != "none" else ((), ())

        def every(vertex: int) -> bool:
            return True

        def repeated(vertex: int) -> bool:
            return any(key in fed for key in self.built.keys[vertex])

        def pass_cost(
            way: int, nodes: Sequence[Node], readers: Callable[[int], bool], *, keeps_results: bool = False
        ) -> tuple[Linear, Linear, Linear]:
            device: Linear = {}
            host: Linear = {}
            messages: Linear = {}
            for node in nodes:
                if not (keeps_results and kept_kernels(node.op)):
                    add(device, self._chosen(t, node.name, lambda use: use.device[way] * SCALE))
                    add(host, self._chosen(t, node.name, lambda use: use.host[way] * SCALE))
                add(messages, self._chosen(t, node.name, lambda use: use.messages[way] * SCALE))
            for index in inner:
                add(device, self._moves(index, lambda use: use.copies[way] * SCALE, readers))
                add(messages, self._moves(index, lambda use: use.messages[way] * SCALE, readers))
            return self.columns.largest("C", (device, host)), messages, host

        ahead, sent, host_forward = pass_cost(0, operations, every)
        back, returned, host_backward = pass_cost(1, operations, every)
        forward = sum_of([(ahead, 1.0), (sent, 1.0)])
        backward = sum_of([(back, 1.0), (returned, 1.0)])
        kept = self._kept(t, operations, without=self._shared_inputs(t, is_alike=False))
        results = [self._results_bytes(t, node.name) for node in operations]
        temporary = results
        if recompute != "none":
            nodes = [node for node in operations if (t, node.name) in again]
            ahead, sent, host = pass_cost(0, nodes, repeated, keeps_results=recompute == "selective")
            backward = sum_of([(backward, 1.0), (ahead, 1.0), (sent, 1.0)])
            host_backward = sum_of([(host_backward, 1.0), (host, 1.0)])
            if recompute == "full":
                kept = self._kept(t, operations)
                temporary = [sum_of([(result, 1.0), (kept, 1.0)]) for result in results] or [kept]
            kept = self._inputs_bytes(t, without=self._shared_inputs(t, is_alike=not is_mixed))
            if recompute == "selective":
                add(kept, self._products_bytes(t, operations))
        column = self.columns.column("M")
        for part in temporary:
            self.columns.at_least(column, scaled(part, 1 / MIB))
        return UnitTerms(
            forward=forward,
            backward=backward,
            host_forward=host_forward,
            host_backward=host_backward,
            kept_bytes=kept,
            temporary=column,
        )

    def edges(self) -> dict[tuple[int, int, int, str], tuple[Linear, Linear]]:
        """Forward and backward of (source template, output, target template, input)."""
        found = {}
        offset = len(self.built.problem.groups) - len(self.space.edges)
        for position, edge in enumerate(self.space.edges):
            ways = []
            for way in (0, 1):
                index = offset + position
                copies = self._moves(index, lambda use: use.copies[way] * SCALE, lambda vertex: True)  # noqa: B023
                sent = self._moves(index, lambda use: use.messages[way] * SCALE, lambda vertex: True)  # noqa: B023
                ways.append(sum_of([(copies, 1.0), (sent, 1.0)]))
            found[edge.source, edge.output, edge.target, edge.node] = (ways[0], ways[1])
        return found

    def _moves(self, index: int, part: Callable[[MoveUse], float], readers: Callable[[int], bool]) -> Linear:
        """What the conversions of a value take at least; `readers` says which consumers count."""
        moves = self._priced(index)
        amounts = [
            {move.column: amount for move in theirs if (amount := part(move.use))}
            for vertex, theirs in moves.by_consumer
            if readers(vertex)
        ]
        if len(amounts) == 1 or not moves.are_one_step:
            return self.columns.largest("W", amounts)
        # Over one axis equal targets alone are shared: the price of (made, wanted), once for all that ask for it.
        by_pair: dict[tuple[State, State], list[Linear]] = {}
        for vertex, theirs in moves.by_consumer:
            for move in theirs if readers(vertex) else ():
                if amount := part(move.use):
                    by_pair.setdefault(move.pair, []).append({move.column: amount})
        return sum_of([(self.columns.largest("z", parts), 1.0) for parts in by_pair.values()])

    def _priced(self, index: int) -> _Moves:
        """The conversions of a value that take something."""
        if index not in self._moves_of:
            group, wanted = self.built.problem.groups[index], self.columns.wanted[index]
            value, known = self.built.moved[index], self.uses.moves
            self._moves_of[index] = _Moves(
                by_consumer=[
                    (
                        vertex,
                        [
                            _Move(pair, column, use)
                            for pair, column in edges.items()
                            if pair[0] != pair[1] and (use := known.get((value, *pair))) is not None
                        ],
                    )
                    for (vertex, _), edges in zip(group.consumers, wanted, strict=True)
                ],
                are_one_step=all(
                    sum(p != r for p, r in zip(*pair, strict=True)) <= 1 for edges in wanted for pair in edges
                ),
            )
        return self._moves_of[index]

    def _uses(self, t: int, name: str) -> list[OperationUse]:
        """Of the choices of an operation that are alive."""
        n = self.columns.vertex[t, name]
        if n not in self._uses_of:
            choices, known = self.built.problem.choices[n], self.uses.operations
            self._uses_of[n] = [known[t, name, labels_of(choices[k])] for k in self.columns.alive[n]]
        return self._uses_of[n]

    def _chosen(self, t: int, name: str, amount: Callable[[OperationUse], float]) -> Linear:
        return self.columns.weighted(self.columns.vertex[t, name], map(amount, self._uses(t, name)))

    def _results_bytes(self, t: int, name: str) -> Linear:
        """Twice the largest result, as the evaluation takes an operation's scratch to be."""
        return self._chosen(t, name, lambda use: 2.0 * use.result_bytes)

    @cached_property
    def _inner(self) -> list[list[int]]:
        """The groups inside every template; those behind them are edges between units."""
        found: list[list[int]] = [[] for _ in self.space.graph.templates]
        groups = self.built.problem.groups
        for index, group in enumerate(groups[: len(groups) - len(self.space.edges)]):
            found[self.built.keys[group.consumers[0][0]][0][0]].append(index)
        return found

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

    def _shared_inputs(self, t: int, *, is_alike: bool) -> frozenset[str]:
        """Inputs whose memory another unit may keep as well: several read it, or its maker keeps it (or passes it on).

        A stage counts such memory once, so that it is no part of every unit's bytes. `is_alike`: all blocks run again,
        and so keep nothing that they make but results of products.
        """
        graph, reads = self.space.graph, self.space.reads
        found: set[str] = set()
        for unit in graph.units[1:]:
            if unit.template != t:
                continue
            for node, value in zip(graph.templates[t].of_kind(Kind.INPUT), unit.inputs, strict=True):
                if not node.output.requires_grad:
                    continue
                maker = graph.units[value.unit].template
                root = self._root(maker, graph.templates[maker].outputs[value.output])
                source = graph.templates[maker].by_name[root.node]
                passes_on = source.kind is Kind.INPUT or bool(kept_kernels(source.op))
                may_keep = not (is_alike and graph.templates[maker].is_module)
                if reads[value] > 1 or passes_on or (may_keep and root in self._keepable(maker)):
                    found.add(node.name)
        return frozenset(found)

    def _keepable(self, t: int) -> frozenset[Ref]:
        """Memory that some choice of a template keeps."""
        if t not in self._keepables:
            found: set[Ref] = set()
            for node in self.space.graph.templates[t].of_kind(Kind.OP):
                kept = {ref for use in self._uses(t, node.name) for ref, _ in use.kept}
                found.update(self._root(t, ref) for ref in kept)
            self._keepables[t] = frozenset(found)
        return self._keepables[t]

    def _kept(self, t: int, operations: Sequence[Node], without: frozenset[str] = frozenset()) -> Linear:
        """Bytes that autograd keeps: every value once, however many keep it."""
        template = self.space.graph.templates[t]
        by_root: dict[Ref, list[Linear]] = {}
        extra: Linear = {}
        for node in operations:
            add(extra, self._chosen(t, node.name, lambda use: float(use.extra_bytes)))
            refs = {ref for use in self._uses(t, node.name) for ref, _ in use.kept}
            for ref in sorted(refs, key=lambda ref: (ref.node, ref.index)):
                root = self._root(t, ref)
                if root.node in without:
                    continue
                kind = template.by_name[root.node].kind
                if kind is not Kind.OP and not (kind is Kind.INPUT and template.type_of(root).requires_grad):
                    continue

                def size(use: OperationUse, ref: Ref = ref) -> float:
                    return max((float(b) for r, b in use.kept if r == ref), default=0.0)

                by_root.setdefault(root, []).append(self._chosen(t, node.name, size))
        parts = [(scaled(extra, 1 / MIB), MIB)]
        for amounts in by_root.values():
            parts.append((self.columns.largest("K", [scaled(amount, 1 / MIB) for amount in amounts]), MIB))
        return sum_of(parts)

    def _products_bytes(self, t: int, operations: Sequence[Node]) -> Linear:
        """The results that selective checkpointing keeps, without their statistics."""
        found: Linear = {}
        for node in operations:
            if kept_kernels(node.op):
                add(found, self._chosen(t, node.name, lambda use: use.result_bytes))
        return found

    def _inputs_bytes(self, t: int, without: frozenset[str]) -> Linear:
        template = self.space.graph.templates[t]
        found: Linear = {}
        for node in template.of_kind(Kind.INPUT):
            if node.output.requires_grad and node.name not in without:
                add(
                    found,
                    self.columns.chosen(
                        self.columns.vertex[t, node.name], lambda c, v=node.output: self.columns.local_bytes(v, c)
                    ),
                )
        return found
