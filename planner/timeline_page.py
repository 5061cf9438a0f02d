"""A simulated step -> one HTML page that needs nothing else: a bar for every action, a row for the ranks of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ..cost_models.units import format_seconds
from .plan import Plan
from .sharding.mesh import described_shares
from .timeline import BUBBLE, SEND, SimulatedStep, Slice

_WIDTH, _LEFT, _ROW, _BAR = 1200, 130, 40, 24
_COLOURS = {
    "forward": "#4c78a8", "backward": "#f58518", "input gradient": "#f58518", "weight gradient": "#ffbf79",
    SEND: "#54a24b", "step": "#b279a2", BUBBLE: "#eeeeee",
}  # fmt: skip
_STYLE = "body{font:14px sans-serif;margin:2em;max-width:1400px}svg text{font:11px sans-serif}.key{margin-right:1.5em}"


def timeline_page(plan: Plan, steps: Sequence[tuple[str, SimulatedStep]]) -> str:
    """The page. `steps`: a title and a step each, drawn to the same scale."""
    longest = max(step.step_seconds for _, step in steps)
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    kinds = [kind for kind in _COLOURS if any(s.kind == kind for _, step in steps for row in step.rows for s in row)]
    key = "".join(f'<span class="key"><span style="color:{_COLOURS[k]}">&#9632;</span> {k}</span>' for k in kinds)
    counts = described_shares(plan.batch_shares) or plan.microbatches
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Step of {escape(plan.model.name)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>{escape(plan.model.name)}: {escape(mesh)}</h1>",
        f"<p>{counts} microbatches, schedule {escape(plan.schedule)}, on {plan.gpus} x "
        f"{escape(plan.cluster)}. An action is named stage, F or B, microbatch.</p>",
        f"<p>{key}</p>",
    ]
    for title, step in steps:
        told = f"{format_seconds(step.step_seconds)}, {100 * step.bubble_fraction:.1f}% in bubbles"
        parts += [f"<h2>{escape(title)}: {told}</h2>", _picture(step, longest)]
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _picture(step: SimulatedStep, longest: float) -> str:
    height = _ROW * len(step.rows) + 20
    per_second = (_WIDTH - _LEFT) / longest if longest else 0.0
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%">']
    for row, (slices, (first, last)) in enumerate(zip(step.rows, step.ranks, strict=True)):
        top = row * _ROW
        name = f"rank {first}" if first == last else f"ranks {first} to {last}"
        lines.append(f'<text x="0" y="{top + 17}">{name}</text>')
        lines.extend(_bar(item, top, per_second) for item in slices)
    end = format_seconds(longest)
    lines.append(f'<text x="{_LEFT}" y="{height - 4}">0</text>')
    lines.append(f'<text x="{_WIDTH}" y="{height - 4}" text-anchor="end">{end}</text></svg>')
    return "\n".join(lines)


def _bar(item: Slice, top: int, per_second: float) -> str:
    x = _LEFT + item.start_seconds * per_second
    width = (item.end_seconds - item.start_seconds) * per_second
    y, height = (top + _BAR + 1, 6) if item.kind == SEND else (top, _BAR)
    told = f"{item.name}, {item.kind}: {format_seconds(item.end_seconds - item.start_seconds)}"
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{_COLOURS[item.kind]}" '
        f'stroke="#fff" stroke-width="0.5"><title>{escape(told)}</title></rect>'
    )
