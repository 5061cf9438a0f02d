"""Plan <-> plan.json: text that is byte-stable, diffs well and may be edited by hand.

Records keep the field order of `planner.plan`, mappings are sorted, floats have six significant digits, and a list or
mapping of plain values stays on one line where it fits. Reading validates against `plan.schema.json` and then the few
facts a schema cannot say (`plan_checks.py`). Predictions are required but only data: after a hand edit they are those
of the plan before it, until `emit` prices it again (`edits.py`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ..cost_models.hardware.toml_file import is_path
from .errors import AutoparError
from .plan import (
    IS_OPTIONAL,
    SCHEMA_VERSION,
    Alternative,
    CollectivePlan,
    ModelSource,
    Plan,
    SolverReport,
    StagePlan,
)
from .plan_checks import check_facts, check_schema, check_version, shown
from .sharding.mesh import written_mesh

LINE_WIDTH = 120
SIGNIFICANT_DIGITS = 6
_LARGEST = 10**300  # whole number of a plan: sums of them are floats yet

# A parsed JSON value; the checks below narrow it.
Json = Any


def plan_to_json(plan: Plan) -> str:
    """Write a plan; the same plan gives the same bytes."""
    return _dump({"schema_version": SCHEMA_VERSION, **_data(plan)}, "") + "\n"


def plan_from_json(text: str, *, where: str) -> Plan:
    """Read and validate a plan; `where` names the file in messages. `plan_from_json(plan_to_json(p))` is `rounded(p)`.

    Raises:
        AutoparError: not JSON, not a plan of this schema version, or a plan that contradicts itself.
    """
    data = _parse(text, where)
    check_version(data, where)
    check_schema(data, where)
    check_facts(data, where)
    return _plan(data)


def read_plan(path: Path) -> Plan:
    """Read plan.json; a relative model path in it, counted from its folder, becomes one that can be opened from here.

    Raises:
        AutoparError: the file cannot be read, or as `plan_from_json`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise AutoparError(
            "a plan is UTF-8 text", where=str(path), fix="give the plan.json that `autopar plan` wrote"
        ) from error
    except OSError as error:
        raise AutoparError(
            f"cannot read the plan: {error.strerror}",
            where=str(path),
            fix="give the plan.json that `autopar plan` wrote",
        ) from error
    plan = plan_from_json(text, where=str(path))
    return _moved(plan, lambda file: os.path.normpath(path.parent / file))


def relative_to(plan: Plan, folder: Path) -> Plan:
    """The plan as it is written into `folder`: paths of the model (of cluster and stack files too) count from there."""

    def move(file: str) -> str:
        try:
            return Path(os.path.relpath(Path(file).absolute(), folder.absolute())).as_posix()
        except ValueError:  # another drive
            return str(Path(file).absolute())

    return _moved(plan, move)


def _moved(plan: Plan, move: Callable[[str], str]) -> Plan:
    cluster, stack = (move(text) if is_path(text) else text for text in (plan.cluster, plan.stack))
    return replace(plan, cluster=cluster, stack=stack, model=replace(plan.model, path=move(plan.model.path)))


def rounded(plan: Plan) -> Plan:
    """The plan with its floats as the file holds them."""
    return _plan(_data(plan))


def _data(value: object) -> Json:
    """Plain JSON data: records by field order, mappings sorted, floats rounded."""
    if is_dataclass(value):
        values = ((field, getattr(value, field.name)) for field in fields(value))
        return {field.name: _data(item) for field, item in values if item or not field.metadata.get(IS_OPTIONAL)}
    if isinstance(value, Mapping):
        return {str(key): _data(item) for key, item in sorted(value.items())}
    if isinstance(value, (list, tuple)):
        return [_data(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"a plan cannot hold {value}")
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return value


def _dump(value: Json, indent: str, before: int = 0) -> str:
    """Indented JSON whose flat containers stay on one line where they fit, after `before` characters of a key."""
    if not isinstance(value, (dict, list)) or not value:
        return json.dumps(value, ensure_ascii=True)
    items = list(value.values()) if isinstance(value, dict) else value
    is_flat = not any(isinstance(item, (dict, list)) and item for item in items)
    if is_flat and indent:
        line = json.dumps(value, ensure_ascii=True)
        if len(indent) + before + len(line) < LINE_WIDTH:  # one for the comma
            return line
    deeper = indent + "  "
    if isinstance(value, dict):
        keys = {key: f"{json.dumps(key)}: " for key in value}
        lines = [f"{deeper}{keys[key]}{_dump(item, deeper, len(keys[key]))}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _dump(item, deeper) for item in value) + f"\n{indent}]"


def _parse(text: str, where: str) -> Json:
    def unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise AutoparError(f"key {twice!r} stands twice in one object", where=where, fix="keep one of the two")
        return found

    def no_constant(name: str) -> Json:
        raise AutoparError(f"{name} is no number of a plan", where=where, fix="write a finite number")

    def whole(digits: str) -> int:
        number = int(digits)
        if abs(number) > _LARGEST:
            raise AutoparError(f"{shown(number)} is too large", where=where, fix="mend the number")
        return number

    def real(digits: str) -> float:
        number = float(digits)
        return number if math.isfinite(number) else no_constant(digits)

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_int=whole, parse_float=real)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno} column {error.colno}"
        raise AutoparError(f"not valid JSON: {error.msg}", where=place, fix="mend the JSON there") from error
    except ValueError as error:  # a number of thousands of digits
        raise AutoparError(f"not a plan: {error}", where=where, fix="mend the number") from error
    except RecursionError as error:
        raise AutoparError("not a plan: nested too deeply", where=where) from error


def _plan(data: Json) -> Plan:
    known = {field.name: data[field.name] for field in fields(Plan) if field.name in data}
    known["model"] = ModelSource(**data["model"])
    known["mesh"] = written_mesh(data["mesh"])  # the file has them by name
    known["stages"] = tuple(
        StagePlan(**{"rank": index, **stage, "fqns": tuple(stage["fqns"])})
        for index, stage in enumerate(data["stages"])
    )
    known["rank_memory_bytes"] = tuple(data.get("rank_memory_bytes", ()))
    known["tensor_shapes"] = {pattern: tuple(shape) for pattern, shape in data["tensor_shapes"].items()}
    known["collectives"] = tuple(CollectivePlan(**entry) for entry in data["collectives"])
    known["batch_shares"] = tuple(data.get("batch_shares", ()))
    known["dp_paces"] = tuple(tuple(float(pace) for pace in paces) for paces in data.get("dp_paces", ()))
    known["alternatives"] = tuple(
        Alternative(**{**entry, "batch_shares": tuple(entry.get("batch_shares", ()))}) for entry in data["alternatives"]
    )
    known["solver"] = SolverReport(**data["solver"])
    known["notes"] = tuple(data["notes"])
    return Plan(**known)
