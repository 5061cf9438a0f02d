"""A plan diff as tables of text, and as markdown for a pull request. The terminal shows the same tables."""

from __future__ import annotations

from ..cost_models.units import format_bytes, format_seconds
from .diff import Measure, PlanDiff, TensorChange
from .tables import Table


def format_measure(measure: Measure, value: float) -> str:
    return format_seconds(value) if measure.unit == "seconds" else format_bytes(value)


def format_change(measure: Measure) -> str:
    """ "+4.2%", "new" where nothing became something, "=" where equal."""
    if measure.change_fraction is None:
        return "new"
    return f"{measure.change_fraction:+.1%}" if measure.old != measure.new else "="


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
            rows=tuple((c.template, c.node, c.axis, c.old, c.new) for c in diff.placements),
        ),
    )
    return tuple(table for table in tables if table.rows)


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
    return f"{decision}; predicted {moves}." if moves else f"{decision}; same predictions for step time and memory."


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
