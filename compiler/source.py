"""Functions as text: expressions with precedence, statements with names and liveness.

Knows Python's syntax, nothing of tensors. A body is a list of statements over keys; it decides which results are
written inside their only reader and which get a variable, and reuses names of dead variables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .text import INDENT, layout

INLINE_WIDTH = 60  # an expression longer than this is not written inside another
INLINE_OPERATIONS = 3

Key = Hashable

# Binding strength, weakest first.
COMPARE, BIT_OR, BIT_XOR, BIT_AND, ADD, MULTIPLY, UNARY, ATOM = range(8)


@dataclass(frozen=True, slots=True)
class Expr:
    """Python source of one expression. `weight` counts the operations in it."""

    text: str
    strength: int = ATOM
    weight: int = 0

    def at(self, strength: int) -> str:
        """The text as an operand of an operator of this strength, in parentheses if it binds weaker."""
        return self.text if self.strength >= strength else f"({self.text})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """`results` = render(operands). `render` gets one Expr per operand.

    `names`: what to call the results, best first name each. `inline`: may be written inside its only reader, but not
    behind a statement that `communicates` if it `saves` something for the backward: what runs again before the backward
    ends with the last thing saved, and would then communicate once more.
    """

    results: tuple[Key, ...]
    operands: tuple[Key, ...]
    render: Callable[[Sequence[Expr]], Expr]
    names: tuple[str, ...]
    comment: str = ""
    inline: bool = False
    communicates: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`for <target> in <iterable>:` over a body that maps `starts` to `results`; result i goes back into `carried[i]`.

    `steps` are the statements of the body over the keys `inside` (the values at its top, one per start), and end in a
    statement whose results are `results`.
    """

    results: tuple[Key, ...]
    starts: tuple[Key, ...]
    inside: tuple[Key, ...]
    back: tuple[int | None, ...]  # per start: the result that replaces it for the next turn, None if it never changes
    header: str
    steps: tuple[Statement, ...]

    @property
    def operands(self) -> tuple[Key, ...]:
        return self.starts


class Body:
    """Builds the lines of one function from its statements."""

    def __init__(self, *, reserved: Iterable[str], depth: int = 2) -> None:
        self._reserved = frozenset(reserved)
        self._indent = INDENT * depth
        self._leaves: dict[Key, Expr] = {}
        self._arguments: dict[Key, str] = {}
        self._steps: list[Statement | Loop] = []

    def leaf(self, key: Key, expr: Expr) -> None:
        """A value with a fixed expression (a parameter)."""
        self._leaves.setdefault(key, expr)

    def argument(self, key: Key, name: str) -> str:
        """A value that is a variable when the function starts; its name is made unique."""
        unique = _unused(name, {*self._arguments.values(), *self._reserved})
        self._arguments[key] = unique
        return unique

    def add(self, step: Statement | Loop) -> None:
        self._steps.append(step)

    def has(self, key: Key) -> bool:
        return key in self._leaves or key in self._arguments or any(key in step.results for step in self._steps)

    def lines(self, outputs: Sequence[Key], finish: Callable[[Sequence[Expr]], str]) -> list[str]:
        """The statements, then `finish(outputs)` as the last line."""
        last = Statement(results=(), operands=tuple(outputs), render=lambda found: Expr(finish(found)), names=())
        writer = _Writer(self._reserved, dict(self._arguments), dict(self._leaves))
        return writer.write([*self._steps, last], self._indent)


class _Writer:
    def __init__(self, reserved: frozenset[str], names: dict[Key, str], exprs: dict[Key, Expr]) -> None:
        self._reserved = reserved
        self._names = names
        self._exprs = exprs

    def write(self, steps: Sequence[Statement | Loop], indent: str) -> list[str]:
        inlined = _inlined(steps, {**self._exprs, **{key: Expr(name) for key, name in self._names.items()}})
        dies = _last_reads(steps, inlined)
        lines: list[str] = []
        for position, step in enumerate(steps):
            if isinstance(step, Statement) and step.results and step.results[0] in inlined:
                self._exprs[step.results[0]] = step.render([self._expr(key) for key in step.operands])
            elif isinstance(step, Loop):
                lines.extend(self._loop(step, position, dies, indent))
            else:
                lines.extend(self._statement(step, position, dies, indent))
        return lines

    def _expr(self, key: Key) -> Expr:
        return Expr(self._names[key]) if key in self._names else self._exprs[key]

    def _statement(self, step: Statement, position: int, dies: Mapping[Key, int], indent: str) -> list[str]:
        text = step.render([self._expr(key) for key in step.operands]).text
        if not step.results:
            return layout(text, indent, step.comment)
        targets = self._targets(step, position, dies)
        return layout(f"{', '.join(targets)} = {text}", indent, step.comment)

    def _targets(self, step: Statement, position: int, dies: Mapping[Key, int]) -> list[str]:
        taken = self._live(position, dies)
        targets: list[str] = []
        for result, name in zip(step.results, step.names, strict=True):
            if result not in dies:
                targets.append("_")
                continue
            chosen = _unused(name, taken)
            taken.add(chosen)
            self._names[result] = chosen
            targets.append(chosen)
        return targets

    def _live(self, position: int, dies: Mapping[Key, int]) -> set[str]:
        """Names that must not be overwritten at `position`: reserved ones and variables read later."""
        return {*self._reserved, *(name for key, name in self._names.items() if dies.get(key, -1) > position)}

    def _loop(self, loop: Loop, position: int, dies: Mapping[Key, int], indent: str) -> list[str]:
        lines: list[str] = []
        live = self._live(position, dies)
        carried: dict[int, str] = {}
        inside = set(live)
        for start, key, back in zip(loop.starts, loop.inside, loop.back, strict=True):
            expr = self._expr(start)
            if back is None:
                self._names[key] = expr.text
                inside.add(expr.text)
                continue
            if back not in carried:
                name = expr.text
                if name in live or not name.isidentifier():
                    name = _unused("x", live | set(carried.values()))
                    lines.append(f"{indent}{name} = {expr.text}")
                carried[back] = name
            self._names[key] = carried[back]
        lines += layout(loop.header, indent)
        results = [carried.get(index) for index in range(len(loop.results))]
        lines.extend(self._turn(loop, results, inside, indent + INDENT))
        for result, name in zip(loop.results, results, strict=True):
            if name is not None:
                self._names[result] = name
        return lines

    def _turn(self, loop: Loop, results: list[str | None], live: set[str], indent: str) -> list[str]:
        """The loop's body; its last statement assigns the loop's results under the names they were carried in by."""
        lines: list[str] = []
        *before, last = loop.steps
        for index, step in enumerate(before):
            # A conversion of a carried value takes over its name, unless the value is read again.
            source = self._expr(step.operands[0]).text
            reread = any(step.operands[0] in other.operands for other in loop.steps[index + 1 :])
            name = source if source not in live and not reread else _unused(step.names[0], live | {source})
            text = step.render([self._expr(key) for key in step.operands]).text
            lines.extend(layout(f"{name} = {text}", indent, step.comment))
            self._names[step.results[0]] = name
            live = live | {name}
        text = last.render([self._expr(key) for key in last.operands]).text
        taken = live | {name for name in results if name}
        for index, name in enumerate(results):
            if name is None:
                results[index] = _unused(last.names[index], taken)
                taken.add(results[index] or "")
        targets = ", ".join(name or "_" for name in results)
        lines.extend(layout(f"{targets} = {text}", indent, last.comment))
        return lines


def _inlined(steps: Sequence[Statement | Loop], known: Mapping[Key, Expr]) -> set[Key]:
    """Results that are written inside their only reader."""
    readers: dict[Key, list[int]] = {}
    for position, step in enumerate(steps):
        for key in step.operands:
            readers.setdefault(key, []).append(position)
    before = (0, *accumulate(isinstance(step, Statement) and step.communicates for step in steps))
    found: set[Key] = set()
    saving: set[Key] = set()  # of these the ones whose expression saves something
    exprs: dict[Key, Expr] = dict(known)
    for position, step in enumerate(steps):
        if isinstance(step, Loop):
            exprs.update((key, Expr("x")) for key in step.results)
            continue
        expr = step.render([exprs[key] for key in step.operands])
        if not step.results:
            continue
        result, read_at = step.results[0], readers.get(step.results[0], [])
        reader = steps[read_at[0]] if len(read_at) == 1 else None
        saves = step.saves or not saving.isdisjoint(step.operands)
        if (
            step.inline
            and len(step.results) == 1
            and isinstance(reader, Statement)
            and expr.weight <= INLINE_OPERATIONS
            and len(expr.text) <= (INLINE_WIDTH if reader.results else 2 * INLINE_WIDTH - 20)
            and not (saves and before[read_at[0]] > before[position + 1])
        ):
            found.add(result)
            exprs[result] = expr
            if saves:
                saving.add(result)
        else:
            exprs.update((key, Expr(name)) for key, name in zip(step.results, step.names, strict=True))
    return found


def _last_reads(steps: Sequence[Statement | Loop], inlined: set[Key]) -> dict[Key, int]:
    """Where each key is read last; what an inlined statement reads is read where its text ends up."""
    dies: dict[Key, int] = {}
    for position in reversed(range(len(steps))):
        step = steps[position]
        where = position
        if isinstance(step, Statement) and step.results and step.results[0] in inlined:
            where = dies[step.results[0]]
        for key in step.operands:
            dies[key] = max(dies.get(key, -1), where)
    return dies


def _unused(name: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    if name not in taken:
        return name
    number = 2
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"
