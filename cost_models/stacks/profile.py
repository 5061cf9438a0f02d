"""Software-stack profiles: which kernels run, as enumerated choices. Numbers belong to the hardware files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ..errors import AutoparError
from ..hardware.toml_file import nearest, read_toml

_FOLDER = Path(__file__).parent

CHOICES: dict[str, tuple[str, ...]] = {
    "fusion": ("eager", "compiled"),
    "float32_matmul": ("ieee", "tf32"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One profile.

    fusion: "eager" launches a kernel per operation; "compiled" fuses chains of pointwise operations.
    float32_matmul: float32 products on the float32 units ("ieee", PyTorch's default) or on the matrix units ("tf32").
    """

    name: str
    description: str
    source: str
    fusion: str
    float32_matmul: str


def stack_names() -> tuple[str, ...]:
    """Every stack of the package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def load_stack(name_or_path: str) -> Stack:
    """A stack by name or file.

    Raises:
        AutoparError: no such stack, or a file with an unknown key or choice.
    """
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        path = Path(name_or_path)
    elif name_or_path in stack_names():
        path = _FOLDER / f"{name_or_path}.toml"
    else:
        raise AutoparError(f"there is no stack {name_or_path!r}", fix=nearest(name_or_path, stack_names()))
    values = read_toml(path)
    names = {field.name for field in fields(Stack)} - {"name"}
    for key in values:
        if key not in names:
            raise AutoparError(f"{key} is no setting of a stack", where=str(path), fix=nearest(key, names))
    texts: dict[str, str] = {}
    for key in sorted(names):
        value = values.get(key)
        if not isinstance(value, str) or not value:
            raise AutoparError(f"{key} is missing or no text", where=str(path), fix=f'add {key} = "..."')
        if key in CHOICES and value not in CHOICES[key]:
            raise AutoparError(f"{key} is {value!r}", where=str(path), fix=nearest(value, CHOICES[key]))
        texts[key] = value
    return Stack(name=path.stem, **texts)


EAGER = load_stack("eager")
