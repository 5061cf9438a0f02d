"""Text only: expressions with precedence, statements with names and liveness, quoting, indentation, line breaking.

Knows Python's syntax and the layout of `ruff format`, nothing of tensors. A body is a list of statements over keys; it
decides which results are written inside their only reader and which get a variable, and reuses names of dead variables.
"""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

LINE_WIDTH = 120
INDENT = "    "
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

    `names`: what to call the results, best first name each. `inline`: may be written inside its only reader.
    `group`: results are written inside readers of the same group only; `heading`: a comment above its first statement.
    """

    results: tuple[Key, ...]
    operands: tuple[Key, ...]
    render: Callable[[Sequence[Expr]], Expr]
    names: tuple[str, ...]
    comment: str = ""
    inline: bool = False
    group: Hashable = None
    heading: str = ""


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
    heading: str = ""

    @property
    def operands(self) -> tuple[Key, ...]:
        return self.starts


def quote(text: str) -> str:
    """A double-quoted Python string, ASCII only."""
    return json.dumps(text, ensure_ascii=True)


def comment(text: str) -> str:
    """Text that is safe behind `#`: one line, printable ASCII."""
    return re.sub(r"[^\x20-\x7e]", "?", text)


def identifier(text: str, default: str = "value") -> str:
    """A valid variable name close to `text`."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII).strip("_")
    if not name or name[0].isdigit():
        name = f"{default}_{name}".rstrip("_")
    return f"{name}_" if keyword.iskeyword(name) else name


def literal(value: object) -> str:
    """Python source of a literal: numbers, strings, None, tuples and lists of these."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f'float("{value}")'
    if isinstance(value, (tuple, list)):
        inner = ", ".join(literal(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    raise TypeError(f"no literal: {value!r}")


def assigned_names(code: str) -> tuple[str, ...]:
    """The variables that a line of the user's code assigns: `q, k, v = f(x)` gives ("q", "k", "v"), else nothing."""
    try:
        body = ast.parse(code.strip()).body
    except SyntaxError:
        return ()
    if len(body) != 1:
        return ()
    statement = body[0]
    if isinstance(statement, ast.AugAssign):
        targets: list[ast.expr] = [statement.target]
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        targets = list(target.elts) if isinstance(target, ast.Tuple) else [target]
    else:
        return ()
    return (
        tuple(target.id for target in targets if isinstance(target, ast.Name))
        if all(isinstance(target, ast.Name) for target in targets)
        else ()
    )


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
        headings: set[str] = set()
        for position, step in enumerate(steps):
            if isinstance(step, Statement) and step.results and step.results[0] in inlined:
                self._exprs[step.results[0]] = step.render([self._expr(key) for key in step.operands])
                if step.heading and step.heading not in headings:
                    headings.add(step.heading)
                    lines.append(f"{indent}# {step.heading}")
                continue
            if step.heading and step.heading not in headings:
                headings.add(step.heading)
                lines.append(f"{indent}# {step.heading}")
            if isinstance(step, Loop):
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
        lines.append(f"{indent}{loop.header}")
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
    readers: dict[Key, list[Statement | Loop]] = {}
    for step in steps:
        for key in step.operands:
            readers.setdefault(key, []).append(step)
    found: set[Key] = set()
    exprs: dict[Key, Expr] = dict(known)
    for step in steps:
        if isinstance(step, Loop):
            exprs.update((key, Expr("x")) for key in step.results)
            continue
        expr = step.render([exprs[key] for key in step.operands])
        if not step.results:
            continue
        result, reading = step.results[0], readers.get(step.results[0], [])
        if (
            step.inline
            and len(step.results) == 1
            and len(reading) == 1
            and isinstance(reading[0], Statement)
            and (reading[0].group == step.group or not reading[0].results)
            and expr.weight <= INLINE_OPERATIONS
            and len(expr.text) <= (INLINE_WIDTH if reading[0].results else 2 * INLINE_WIDTH - 20)
        ):
            found.add(result)
            exprs[result] = expr
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


def layout(code: str, indent: str, note: str = "") -> list[str]:
    """Lines of one statement as `ruff format` lays them out; the note stands above where it does not fit behind."""
    note = comment(note)
    if len(indent) + len(code) <= LINE_WIDTH:
        behind = f"{indent}{code}  # {note}"
        if note and len(behind) > LINE_WIDTH:
            return [f"{indent}# {note}", f"{indent}{code}"]
        return [behind if note else f"{indent}{code}"]
    lines = [f"{indent}# {note}"] if note else []
    return [*lines, *_broken(code, indent)]


def _broken(code: str, indent: str) -> list[str]:
    """Break at the last bracket pair of the statement: arguments on one line if they fit, else one item a line."""
    opening, closing = _outer_brackets(code)
    if opening < 0:
        return [f"{indent}{code}"]
    head, inner, tail = code[: opening + 1], code[opening + 1 : closing], code[closing:]
    deeper = indent + INDENT
    is_call = opening > 0 and (code[opening - 1].isalnum() or code[opening - 1] in "_])")
    if is_call and len(deeper) + len(inner) <= LINE_WIDTH and not inner.endswith(","):
        return [f"{indent}{head}", f"{deeper}{inner}", f"{indent}{tail}"]
    parts = _split_commas(inner)
    if len(parts) == 1 and " for " in inner and not is_call:  # a comprehension
        return [f"{indent}{head}", *_comprehension(inner, deeper), f"{indent}{tail}"]
    lines = [f"{indent}{head}"]
    for part in parts:
        lines.extend(_element(part, deeper))
    return [*lines, f"{indent}{tail}"]


def _comprehension(inner: str, indent: str) -> list[str]:
    if len(indent) + len(inner) <= LINE_WIDTH:
        return [f"{indent}{inner}"]
    item, _, rest = inner.rpartition(" for ")
    return [f"{indent}{item}", f"{indent}for {rest}"]


def _element(part: str, indent: str) -> list[str]:
    if len(indent) + len(part) + 1 <= LINE_WIDTH or part.startswith("**"):
        return [f"{indent}{part},"]
    broken = _broken(part, indent)
    return [*broken[:-1], f"{broken[-1]},"]


def _outer_brackets(code: str) -> tuple[int, int]:
    """The last bracket pair at the outermost level."""
    depth, opening, found = 0, -1, (-1, -1)
    quoted = False
    for position, char in enumerate(code):
        if char == '"' and (position == 0 or code[position - 1] != "\\"):
            quoted = not quoted
        if quoted:
            continue
        if char in "([{":
            if depth == 0:
                opening = position
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0 and position > opening + 1:
                found = opening, position
    return found


def _split_commas(inner: str) -> list[str]:
    parts, depth, start, quoted = [], 0, 0, False
    for position, char in enumerate(inner):
        if char == '"' and (position == 0 or inner[position - 1] != "\\"):
            quoted = not quoted
        if quoted:
            continue
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(inner[start:position].strip())
            start = position + 1
    if inner[start:].strip():
        parts.append(inner[start:].strip())
    return parts
