"""The text of the emitted train.py: the plan's facts as constants, then the loop of train.py.jinja."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...planner.capture.graph import ModelGraph
from ...planner.plan import Plan
from ...planner.schedules import get_schedule
from ..text import layout, numbers

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = Path(__file__).with_name("train.py.jinja")


def python_literal(value: object) -> str:
    """A JSON-like value as Python source, double-quoted; nothing of it is ever more than a literal.

    Raises:
        TypeError: anything but None, booleans, numbers, strings, lists, tuples and string-keyed mappings of these.
    """
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        text = ascii(value)
        if text.startswith('"'):
            return text
        return '"' + text[1:-1].replace('"', '\\"') + '"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{python_literal(k)}: {python_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(python_literal(item) + ", " for item in value).rstrip() + ")" if value else "()"
    if isinstance(value, list):
        return "[" + ", ".join(python_literal(item) for item in value) + "]"
    raise TypeError(f"no literal for {type(value).__name__}")


def _mapping_lines(name: str, values: Mapping[str, object]) -> list[str]:
    """`NAME = {...}` as the formatter would write it: on one line if it fits, else one entry a line."""
    line = f"{name} = {python_literal(values)}"
    if len(line) <= 120:
        return [line]
    return [f"{name} = {{", *(f"    {python_literal(k)}: {python_literal(v)}," for k, v in values.items()), "}"]


def render_train_script(plan: Plan, graph: ModelGraph, *, is_fused: bool) -> str:
    """The text of train.py."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.mesh.items() if size > 1) or "one rank"
    constants = [
        f"MODEL_FILE = {python_literal(plan.model.path)}  # the user's, relative to this folder",
        f"MODEL_NAME = {python_literal(plan.model.name)}",
        *_mapping_lines("MODEL_ARGUMENTS", plan.model.arguments),
        f"BATCH_SIZE = {plan.batch_size}",
        *(
            layout(f"BATCH_SHARES = {numbers(plan.batch_shares)}", "", "microbatches of each dp rank, all of one size")
            if plan.batch_shares
            else [f"DATA_PARALLEL = {plan.mesh.get('dp', 1)}", f"MICROBATCHES = {plan.microbatches}"]
        ),
        *_mapping_lines("INPUT_BATCH_DIMS", {value.name: value.batch_dim for value in graph.inputs}),
        f"OPTIMIZER = {python_literal(plan.optimizer)}",
        f"PRECISION = {python_literal('bf16' if plan.precision == 'bf16' else 'fp32')}",
    ]
    name = (
        "".join(character for character in graph.name if character.isidentifier() or character.isdigit()) or "a model"
    )
    return _template().render(
        name=name,
        ranks=plan.gpus,
        mesh=mesh,
        constants="\n".join(constants),
        has_shares=bool(plan.batch_shares),
        is_fused=is_fused,
        several_stages=get_schedule(plan.schedule).is_multi_stage,
        zero_1=plan.zero == 1 and plan.mesh.get("dp", 1) * plan.mesh.get("cp", 1) > 1,
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, StrictUndefined

    made = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return made.from_string(_TEMPLATE.read_text(encoding="utf-8"))
