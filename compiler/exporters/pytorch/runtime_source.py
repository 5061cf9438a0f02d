"""collectives.py: the runtime functions that a plan calls, with what these call, copied as source text."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...text import layout

RUNTIME = Path(__file__).parents[2] / "runtime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A module-level function, class or constant: its text and the names it reads."""

    name: str
    text: str
    reads: frozenset[str]
    is_function: bool
    order: int
    parameters: tuple[tuple[str, object], ...] = ()  # of a function: name and default, ... where it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    definitions: dict[str, Definition]
    imports: dict[str, tuple[str, str | None]]  # bound name -> (module, attribute or None for `import module as name`)

    @property
    def functions(self) -> frozenset[str]:
        """What emitted code may call."""
        return frozenset(n for n, d in self.definitions.items() if d.is_function and not n.startswith("_"))


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """Read compiler/runtime; `collectives` first, since the others build on it."""
    definitions: dict[str, Definition] = {}
    imports: dict[str, tuple[str, str | None]] = {}
    paths = sorted(
        (p for p in RUNTIME.glob("*.py") if p.stem != "__init__"), key=lambda p: (p.stem != "collectives", p.stem)
    )
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.Import):
                imports.update({alias.asname or alias.name: (alias.name, None) for alias in node.names})
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module != "__future__":
                imports.update({alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names})
            elif (name := _defined(node)) is not None:
                if name in definitions:
                    raise ValueError(f"compiler/runtime defines {name} twice")
                definitions[name] = Definition(
                    name=name,
                    text=_text(text, node),
                    reads=frozenset(n.id for n in ast.walk(node) if isinstance(n, ast.Name)),
                    is_function=isinstance(node, ast.FunctionDef),
                    order=len(definitions),
                    parameters=tuple(_parameters(node)) if isinstance(node, ast.FunctionDef) else (),
                )
    return Runtime(definitions=definitions, imports=imports)


def _defined(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _parameters(node: ast.FunctionDef) -> Iterator[tuple[str, object]]:
    """Positional parameters with their literal defaults."""
    names = [argument.arg for argument in node.args.args]
    defaults: list[object] = [ast.literal_eval(value) for value in node.args.defaults]
    yield from zip(names, [...] * (len(names) - len(defaults)) + defaults, strict=True)


def _text(source: str, node: ast.stmt) -> str:
    """The definition with its decorators and the comment right above."""
    lines = source.splitlines()
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : node.end_lineno])


def render_collectives(names: frozenset[str]) -> str:
    """The text of collectives.py with these functions."""
    found = runtime()
    needed: set[str] = set()
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            waiting.extend(sorted(found.definitions[name].reads & found.definitions.keys()))
    chosen = sorted((found.definitions[name] for name in needed), key=lambda d: d.order)
    body = "\n\n\n".join(definition.text for definition in chosen)
    reads = {name for definition in chosen for name in definition.reads}
    imports = "\n".join(_imports(reads, found))
    return f"# SPDX-License-Identifier: Apache-2.0\n{_DOCSTRING}\n\n{imports}\n\n\n{body}\n"


_DOCSTRING = '''\
"""Operations over one mesh axis, each with the gradient that belongs to it. Written by autopar; needs PyTorch only.

`S -> R / reduce_scatter` reads: the value goes from split to replicated, its gradient is reduced and scattered. P is a
sum over ranks that has not been taken. `axis` is a one-dimensional DeviceMesh. `groups` is for a dim that holds several
parts in a row, such as query, key and value: every part is split over the axis by itself.
"""'''


def _imports(reads: set[str], found: Runtime) -> Iterator[str]:
    """The imports that are read, standard library first, laid out as ruff sorts them."""
    plain: list[str] = []
    members: dict[str, list[str]] = {}
    for name, (module, attribute) in found.imports.items():
        if name not in reads:
            continue
        if attribute is None:
            plain.append(f"import {module}" + (f" as {name}" if name != module else ""))
        else:
            members.setdefault(module, []).append(attribute if attribute == name else f"{attribute} as {name}")
    lines = [*sorted(plain)]
    sections: list[list[str]] = [[], []]
    for line in lines:
        sections[line.split()[1].startswith("torch")].append(line)
    for module in sorted(members):
        text = f"from {module} import {', '.join(sorted(members[module]))}"
        sections[module.startswith("torch")].extend(layout(text, ""))
    standard, torch = sections
    yield from standard
    if standard and torch:
        yield ""
    yield from torch
