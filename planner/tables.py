"""A table of text: what `explain` and `diff` have to show, before the terminal or markdown decides how it looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells. The last `num_numeric` columns hold numbers and are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    num_numeric: int = 0

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, a row has {len(row)}")

    def is_numeric(self, column: int) -> bool:
        return column >= len(self.columns) - self.num_numeric
