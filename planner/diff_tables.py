"""A plan diff as tables of text, and as markdown for a pull request. The terminal shows the same tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..cost_models.units import format_bytes, format_seconds
from .diff import Measure, PlacementChange, PlanDiff, TensorChange
from .tables import Table


def format_measure(measure: Measure, value: float) -> str:
    return format_seconds(value) if measure.unit == "seconds" else format_bytes(value)


def format_change(measure: Measure) -> str:
    """ "+4.2%", "new" where nothing became something, "=" if equal, "~" where it rounds to nothing, "75x" if huge."""
    change = measure.change_fraction
    if change is None:
        return "new"
    if change == 0:
        return "="
    if change >= 9:
        return f"{float(f'{1 + change:.3g}'):,g}x"
    return "~" if abs(change) < 0.0005 else f"{change:+.1%}"


def diff_tables(diff: PlanDiff) -> tuple[Table, ...]:
    """Predictions first, then what was decided otherwise; sections without a change are left out."""
    predicted = tuple(
        (m.name.replace("_", " "), format_measure(m, m.old), format_measure(m, m.new), format_change(m))
        for m in diff.measures
    )
    tables = (
        Table(title="Predicted", columns=("measure", "old", "new", "change"), rows=predicted, num_numeric=3),
        Table(
            title="Settings",
            columns=("setting", "old", "new"),
            rows=tuple(
                (f"mesh {c.name}" if c.section == "mesh" else c.name.replace("_", " "), c.old, c.new)
                for c in diff.settings
            ),
        ),
        Table(
            title="Stages",
            columns=("stage", "old", "new"),
            rows=tuple((str(c.stage), " ".join(c.old) or "-", " ".join(c.new) or "-") for c in diff.stages),
        ),
        Table(
            title="Parameters",
            columns=("name", "change", "old", "new"),
            rows=tuple((c.fqn, c.event.value, *_tensor_sides(c)) for c in diff.tensors),
        ),
        Table(
            title="Operations",
            columns=("template", "operation", "axis", "old", "new"),
            rows=_operation_rows(diff.placements),
        ),
    )
    return tuple(table for table in tables if table.rows)


def _operation_rows(changes: Sequence[PlacementChange]) -> tuple[tuple[str, ...], ...]:
    """One row a change; an axis that a whole template newly splits, or splits no more, is one row."""
    groups: dict[tuple[str, str], list[PlacementChange]] = {}
    for change in changes:
        groups.setdefault((change.template, change.axis), []).append(change)
    rows: list[tuple[str, ...]] = []
    for (template, axis), group in groups.items():
        is_new, is_gone = all(c.old == "none" for c in group), all(c.new == "none" for c in group)
        if len(group) > 2 and (is_new or is_gone):
            sides = ("none", "split") if is_new else ("split", "none")
            rows.append((template, f"{len(group)} operations", axis, *sides))
        else:
            rows.extend((c.template, c.node, c.axis, c.old, c.new) for c in group)
    return tuple(rows)


def _tensor_sides(change: TensorChange) -> tuple[str, str]:
    def side(shape: tuple[int, ...] | None, placement: str) -> str:
        if not placement:
            return "-"
        size = "x".join(map(str, shape)) or "scalar" if shape is not None else ""
        return f"{size} {placement}".strip()

    return side(change.old_shape, change.old_placement), side(change.new_shape, change.new_placement)


def headline(diff: PlanDiff) -> str:
    """One line: whether the decision is the same, and how step time and memory move."""
    if diff.is_empty:
        return "The plans are the same."
    moves = ", ".join(f"{m.name.replace('_', ' ')} {format_change(m)}" for m in diff.measures[:2] if m.old != m.new)
    decision = "Same decision" if diff.is_same_decision else "The decision differs"
    return f"{decision}; predicted {moves}." if moves else f"{decision}; step time and memory are predicted alike."


def diff_to_markdown(diff: PlanDiff, *, old: str, new: str) -> str:
    """A comment for a pull request; long tables are folded away."""
    parts = [f"### autopar: `{old}` -> `{new}`", headline(diff)]
    if not diff.is_empty:
        for table in diff_tables(diff):
            text = _markdown_table(table)
            if len(table.rows) > 12:
                text = f"<details><summary>{table.title} ({len(table.rows)})</summary>\n\n{text}\n\n</details>"
            else:
                text = f"**{table.title}**\n\n{text}"
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    rule = ["---:" if table.is_numeric(index) else "---" for index in range(len(table.columns))]
    lines = [table.columns, tuple(rule), *(tuple(map(_cell, row)) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """A name may hold what markdown would read as markup."""
    safe = text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
    return safe.replace("*", "\\*").replace("_", "\\_").replace("`", "\\`")
