"""Text of Python source: quoting, identifiers, literals, and lines laid out as `ruff format` lays them out."""

from __future__ import annotations

import ast
import json
import keyword
import re
from collections.abc import Sequence
from itertools import groupby

LINE_WIDTH = 120
INDENT = "    "
MOST_NUMBERS = 8  # that are written one by one


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


def numbers(values: Sequence[int]) -> str:
    """Source of a tuple of numbers; many are written by runs: `(*[6] * 32, *[2] * 32)`."""
    if len(values) <= MOST_NUMBERS:
        return literal(tuple(values))
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    parts = [f"*[{value}] * {count}" if count > 1 else str(value) for value, count in runs]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


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
    if len(parts) == 1 and code[opening] == "(" and not is_call and not inner.rstrip().endswith(","):
        # Parentheses of a term: a comma would make it a tuple.
        inside = [f"{deeper}{inner}"] if len(deeper) + len(inner) <= LINE_WIDTH else _broken(inner, deeper)
        return [f"{indent}{head}", *inside, f"{indent}{tail}"]
    lines = [f"{indent}{head}"]
    for part in parts:
        lines.extend(_element(part, deeper))
    return [*lines, f"{indent}{tail}"]


def _comprehension(inner: str, indent: str) -> list[str]:
    if len(indent) + len(inner) <= LINE_WIDTH:
        return [f"{indent}{inner}"]
    item, _, rest = inner.rpartition(" for ")
    is_long = len(indent) + len(item) > LINE_WIDTH
    return [*(_broken(item, indent) if is_long else [f"{indent}{item}"]), f"{indent}for {rest}"]


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
