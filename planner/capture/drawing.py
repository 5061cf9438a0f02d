"""The folded graph as a picture: SVG, and one HTML page that needs nothing else.

One panel for every run of equal units, in execution order, with the operations of the template inside, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from .graph import Kind, ModelGraph, Node, Ref, Template

_BOX_WIDTH, _BOX_HEIGHT = 190, 34
_GAP_X, _GAP_Y = 18, 26
_MARGIN, _TITLE = 16, 30
_HEAVY = ("linear", "mm", "bmm", "matmul", "conv1d", "conv2d", "conv3d", "convolution", "embedding", "einsum")
_ATTENTION = ("scaled_dot_product_attention",)
_STYLE = """
text { font: 11px ui-sans-serif, system-ui, sans-serif; fill: #1c2430; }
.title { font-size: 14px; font-weight: 600; } .small { font-size: 9.5px; fill: #5a6675; }
.panel { fill: #f7f9fb; stroke: #c6d0da; } .op { fill: #fff; stroke: #9aa8b6; }
.heavy { fill: #dcebff; stroke: #4a80c4; } .attention { fill: #ffe9d2; stroke: #c98332; }
.input { fill: #eef3e6; stroke: #8ba86a; } .edge { fill: none; stroke: #8492a1; }
.skip { stroke: #c0603c; stroke-width: 1.5; }
.flow { fill: none; stroke: #3c4a5a; stroke-width: 2; }
"""


@dataclass(frozen=True, slots=True)
class Run:
    """`repeats` times the sequence of `templates`, from unit `first` on."""

    first: int
    templates: tuple[int, ...]
    repeats: int


def runs(graph: ModelGraph, longest_period: int = 4) -> tuple[Run, ...]:
    """The units as runs of repeated sequences, greedily the one that covers most units."""
    sequence = [unit.template for unit in graph.units]
    found = []
    at = 0
    while at < len(sequence):
        best = Run(at, (sequence[at],), 1)
        for period in range(1, longest_period + 1):
            word = sequence[at : at + period]
            repeats = 1
            while sequence[at + repeats * period : at + (repeats + 1) * period] == word:
                repeats += 1
            if repeats > 1 and repeats * period > len(best.templates) * best.repeats:
                best = Run(at, tuple(word), repeats)
        found.append(best)
        at += len(best.templates) * best.repeats
    return tuple(found)


def draw_svg(graph: ModelGraph, *, lines: Sequence[str] = ()) -> str:
    """A standalone SVG; `lines` are written under the title."""
    body: list[str] = []
    y = _MARGIN + 20
    body.append(_text(_MARGIN, y, f"{graph.name}: batch {graph.batch_size}, {len(graph.units)} units", "title"))
    for line in lines:
        y += 17
        body.append(_text(_MARGIN, y, line))
    y += 18
    width = 480.0
    for number, run in enumerate(runs(graph)):
        for place, index in enumerate(run.templates):
            panel, panel_width, panel_height = _panel(graph, graph.templates[index], run, place, _MARGIN, y)
            if number or place:
                body.append(f'<path class="flow" d="M {_MARGIN + 60} {y - 20} v 14" marker-end="url(#arrow)"/>')
            body.extend(panel)
            width = max(width, panel_width + 2 * _MARGIN)
            y += panel_height + 24
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" '
        f'viewBox="0 0 {width:.0f} {y:.0f}"><style>{_STYLE}</style>'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#3c4a5a"/></marker></defs>'
    )
    return head + "\n".join(body) + "</svg>\n"


def draw_html(graph: ModelGraph, *, lines: Sequence[str] = ()) -> str:
    """One self-contained page: the picture, and a table of the templates."""
    rows = "".join(
        f"<tr><td>{escape(t.name)}</td><td>{escape(t.pattern)}</td><td>{count}</td>"
        f"<td>{len(t.of_kind(Kind.OP))}</td><td>{_num_parameters(t):,}</td></tr>"
        for t, count in zip(graph.templates, graph.counts(), strict=True)
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in graph.notes)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(graph.name)}</title><style>'
        "body{font:14px ui-sans-serif,system-ui,sans-serif;margin:24px;color:#1c2430}"
        "td,th{padding:3px 14px 3px 0;text-align:left;border-bottom:1px solid #e1e7ed}"
        f"table{{border-collapse:collapse;margin:16px 0}}</style></head><body><h1>{escape(graph.name)}</h1>{notes}"
        "<table><tr><th>template</th><th>units</th><th>times</th><th>operations</th><th>parameters each</th></tr>"
        f"{rows}</table>{draw_svg(graph, lines=lines)}</body></html>\n"
    )


def _num_parameters(template: Template) -> int:
    return sum(node.output.numel for node in template.of_kind(Kind.PARAMETER))


def _panel(
    graph: ModelGraph, template: Template, run: Run, place: int, left: float, top: float
) -> tuple[list[str], float, float]:
    layers = _layers(template)
    widest = max((len(layer) for layer in layers), default=1)
    title = f"{template.name}  {template.pattern}" + (f"  x {run.repeats}" if run.repeats > 1 else "")
    parameters = _num_parameters(template)
    subtitle = f"{parameters:,} parameters" + (" each" if run.repeats > 1 else "")
    width = max(widest * (_BOX_WIDTH + _GAP_X) + _GAP_X, 8.5 * (len(title) + len(subtitle)) + 40)
    height = _TITLE + len(layers) * (_BOX_HEIGHT + _GAP_Y) + 8
    shapes = [f'<rect class="panel" x="{left}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8"/>']
    if run.repeats > 1:
        shapes.insert(
            0,
            f'<rect class="panel" x="{left + 5}" y="{top + 5:.0f}" width="{width:.0f}" height="{height:.0f}" rx="8"/>',
        )
    shapes.append(_text(left + 12, top + 20, title, "title"))
    shapes.append(_text(left + 24 + 8.5 * len(title), top + 20, subtitle, "small"))
    corners: dict[str, tuple[float, float]] = {}
    for depth, layer in enumerate(layers):
        for column, node in enumerate(layer):
            x = left + _GAP_X + column * (_BOX_WIDTH + _GAP_X)
            corners[node.name] = (x, top + _TITLE + depth * (_BOX_HEIGHT + _GAP_Y))
    edges, boxes = [], []
    for node in (node for layer in layers for node in layer):
        x, y = corners[node.name]
        for name in dict.fromkeys(ref.node for ref in node.operands if ref.node in corners):
            edges.append(_edge(*corners[name], x, y))
        boxes.extend(_box(template, node, x, y))
    return [*shapes, *edges, *boxes], width, height


def _edge(from_x: float, from_y: float, x: float, y: float) -> str:
    """From the box whose corner is (from_x, from_y) to the one at (x, y); round the boxes between them in a column."""
    if from_x == x and y - from_y > _BOX_HEIGHT + _GAP_Y:
        right, out = x + _BOX_WIDTH, _GAP_X * 0.6
        start, end = from_y + _BOX_HEIGHT / 2, y + _BOX_HEIGHT / 2
        return (
            f'<path class="edge skip" d="M {right:.0f} {start:.0f} q {out:.0f} 0 {out:.0f} {out:.0f} '
            f'V {end - out:.0f} q 0 {out:.0f} {-out:.0f} {out:.0f}"/>'
        )
    start_x, start_y, end_x = from_x + _BOX_WIDTH / 2, from_y + _BOX_HEIGHT, x + _BOX_WIDTH / 2
    bend = (y - start_y) / 2
    return (
        f'<path class="edge" d="M {start_x:.0f} {start_y:.0f} C {start_x:.0f} {start_y + bend:.0f} '
        f'{end_x:.0f} {y - bend:.0f} {end_x:.0f} {y:.0f}"/>'
    )


def _layers(template: Template) -> list[list[Node]]:
    """Inputs and operations by longest path from the inputs; within a layer near what they read."""
    drawn = [node for node in template.nodes if node.kind in (Kind.INPUT, Kind.OP)]
    depth: dict[str, int] = {}
    layers: list[list[Node]] = []
    column: dict[str, float] = {}
    for node in drawn:
        above = [ref.node for ref in node.operands if ref.node in depth]
        depth[node.name] = 1 + max((depth[name] for name in above), default=-1)
        while len(layers) <= depth[node.name]:
            layers.append([])
        layers[depth[node.name]].append(node)
    for layer in layers:

        def wanted(node: Node) -> float:
            above = [column[ref.node] for ref in node.operands if ref.node in column]
            return sum(above) / len(above) if above else 0.0

        layer.sort(key=wanted)
        column.update({node.name: float(index) for index, node in enumerate(layer)})
    return layers


def _box(template: Template, node: Node, x: float, y: float) -> list[str]:
    operation = node.op.split(".")[1] if node.op else "input"
    kind = "op"
    if node.kind is Kind.INPUT:
        kind = "input"
    elif operation in _ATTENTION:
        kind = "attention"
    elif operation in _HEAVY:
        kind = "heavy"
    shape = " ".join("x".join(map(str, out.shape)) or "scalar" for out in node.outputs[:3])
    tensors = [
        f"{ref.node.rsplit('.', 1)[-1]} {'x'.join(map(str, template.type_of(ref).shape))}"
        for ref in node.operands
        if template.by_name[ref.node].kind is Kind.PARAMETER
    ]
    detail = f"{shape}  [{', '.join(tensors)}]" if tensors else shape
    marked = " *" if any(Ref(node.name, i) in template.outputs for i in range(len(node.outputs))) else ""
    tip = escape(f"{node.name}\n{node.op}\n{node.source}")
    return [
        f'<g><title>{tip}</title><rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{_BOX_WIDTH}" '
        f'height="{_BOX_HEIGHT}" rx="5"/>',
        _text(x + 7, y + 14, _short(node.name + marked, 30)),
        _text(x + 7, y + 27, _short(detail, 38), "small") + "</g>",
    ]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[3 - length :]


def _text(x: float, y: float, text: str, style: str = "") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'
