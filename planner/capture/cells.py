"""Mutable names over immutable values: how in-place operations become functional ones.

A cell is what a name of the user's program points to. A view cell knows the cell it views and how; writing to it
scatters the new value into its base, and reading it after its base has changed takes the view again. No second trace is
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .graph import Arg, Ref


@dataclass(slots=True, eq=False)
class Cell:
    """One name. `view`: the base's value -> this one's; `unview`: (base value, new own value) -> new base value."""

    value: Ref
    owner: str = ""  # the placeholder that the storage belongs to
    sealed_by: int | None = None  # the group of blocks that it comes from, where it cannot be written to
    base: Cell | None = None
    view: Callable[[Ref], Ref] | None = None
    unview: Callable[[Ref, Ref], Ref] | None = None
    version: int = 0
    seen_version: int = 0

    def read(self) -> Ref:
        """The current value."""
        if self.base is not None:
            base_value = self.base.read()
            if self.seen_version != self.base.version:
                assert self.view is not None
                self.value = self.view(base_value)
                self.seen_version = self.base.version
                self.version += 1
        return self.value

    def write(self, value: Ref) -> None:
        """Give this name, and every name that shares its storage, a new value."""
        if self.base is not None:
            assert self.unview is not None
            self.base.write(self.unview(self.base.read(), value))
            self.seen_version = self.base.version
        self.value = value
        self.version += 1

    @property
    def root(self) -> Cell:
        return self if self.base is None else self.base.root


def read_all(arg: Arg) -> Arg:
    """An argument with every cell replaced by its current value."""
    if isinstance(arg, Cell):
        return arg.read()
    if isinstance(arg, tuple):
        return tuple(read_all(item) for item in arg)
    return arg
