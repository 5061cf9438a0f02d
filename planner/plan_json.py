"""Plan <-> plan.json: text that is byte-stable, diffs well and may be edited by hand.

Records keep the field order of `planner.plan`, mappings are sorted, floats have six significant digits, and a list or
mapping of plain values stays on one line where it fits. Reading validates against `plan.schema.json` and then the few
facts a schema cannot say. Predictions (times, bytes, collectives, runner-ups) are required but only data: `emit`
recomputes none of them, so after a hand edit they describe the plan before the edit; `autopar plan --check` and
`autopar verify` say where they no longer hold.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..cost_models.hardware.toml_file import is_path
from .blocks import expanded
from .checkpointing import MIXED
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
from .sharding.mesh import refuse_shares, written_mesh
from .zero import FREED

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
    _check_version(data, where)
    _check_schema(data, where)
    _check_facts(data, where)
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
            raise AutoparError(f"{_shown(number)} is too large", where=where, fix="mend the number")
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


def _check_version(data: Json, where: str) -> None:
    if not isinstance(data, dict) or "schema_version" not in data:
        raise AutoparError(
            "not a plan: it has no schema_version", where=where, fix="give the plan.json that `autopar plan` wrote"
        )
    if type(data["schema_version"]) is not int or data["schema_version"] != SCHEMA_VERSION:
        raise AutoparError(
            f"the plan has schema_version {data['schema_version']!r}, this autopar reads {SCHEMA_VERSION}",
            where=where,
            fix="plan again with this autopar, or use the autopar that wrote it",
        )


@lru_cache(maxsize=1)
def schema() -> Mapping[str, Json]:
    """The JSON Schema of plan.json."""
    return json.loads(Path(__file__).with_name("plan.schema.json").read_text(encoding="utf-8"))


def _check_schema(data: Json, where: str) -> None:
    from jsonschema import Draft202012Validator, validators

    # JSON Schema takes 8.0 for an integer; a plan does not.
    types = Draft202012Validator.TYPE_CHECKER.redefine(
        "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
    )
    validator = validators.extend(Draft202012Validator, type_checker=types)(schema())
    errors = sorted(validator.iter_errors(data), key=lambda error: (len(error.absolute_path), error.json_path))
    if not errors:
        return
    first = errors[0]
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    what, fix = _explain(str(first.validator), first.validator_value, first.instance, first.schema)
    raise AutoparError(f"{_path(first.absolute_path)} {what}{more}", where=where, fix=fix)


def _path(parts: Sequence[str | int]) -> str:
    text = "$"
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if part.isidentifier() else f"[{json.dumps(part)}]"
    return text


def _shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(validator: str, allowed: Json, instance: Json, rule: Json) -> tuple[str, str]:
    """What is wrong with `instance`, and what to write instead, for the keywords that our schema uses."""
    value = _shown(instance)
    if validator == "enum":
        choices = ", ".join(_shown(choice) for choice in allowed)
        return f"is {value}", f"use one of {choices}"
    if validator == "type":
        types = allowed if isinstance(allowed, str) else " or ".join(allowed)
        return f"is {value}, which is no {types}", f"write {_article(types)} {types}"
    if validator in ("minimum", "maximum"):
        bound = "least" if validator == "minimum" else "most"
        return f"is {value}", f"write a number of at {bound} {allowed}"
    if validator == "pattern":
        return f"is {value}", rule.get("description", f"write text that matches {allowed}")
    if validator == "required":
        missing = ", ".join(name for name in allowed if name not in instance)
        return f"lacks {missing}", "add it, or plan again"
    if validator == "additionalProperties":
        known = sorted(rule.get("properties", ()))
        unknown = sorted(set(instance) - set(known))
        near = get_close_matches(unknown[0], known, n=1)
        return (
            f"has the unknown key {unknown[0]!r}",
            f"rename it to {near[0]!r}" if near else f"known keys: {', '.join(known)}",
        )
    return f"is {value}, which breaks {validator} {_shown(allowed)}", "mend it, or plan again"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _check_facts(data: Json, where: str) -> None:
    """What the schema cannot say: numbers that must agree with each other."""

    def require(is_true: bool, what: str, fix: str) -> None:
        if not is_true:
            raise AutoparError(what, where=where, fix=fix)

    mesh, stages = data["mesh"], data["stages"]
    shape = " * ".join(f"{axis}={size}" for axis, size in mesh.items())
    require(
        math.prod(mesh.values()) == data["gpus"],
        f"$.mesh is {shape} = {math.prod(mesh.values())} ranks, but $.gpus is {data['gpus']}",
        "make the product of the axes equal gpus",
    )
    require(
        len(stages) % mesh["pp"] == 0,
        f"$.stages has {len(stages)} stages, but $.mesh.pp is {mesh['pp']}",
        "write as many stages for every pipeline rank, in the order of the model",
    )
    memory = data.get("rank_memory_bytes", [])
    require(
        len(memory) == (0 if len(stages) == mesh["pp"] else mesh["pp"]),
        f"$.rank_memory_bytes has {len(memory)} entries for {len(stages)} stages on pp={mesh['pp']}",
        "write one entry per pipeline rank where ranks hold several stages, else none",
    )
    for index, stage in enumerate(stages):
        require(
            stage["first"] < stage["last"],
            f"$.stages[{index}] holds no unit: first {stage['first']}, last {stage['last']}",
            "a stage holds units [first, last), at least one",
        )
        require(
            index == 0 or stage["first"] == stages[index - 1]["last"],
            f"$.stages[{index}].first is {stage['first']}, but stage {index - 1} ends at {stages[index - 1]['last']}",
            "stages follow each other without gap or overlap",
        )
        require(
            stage.get("rank", index) < mesh["pp"],
            f"$.stages[{index}].rank is {stage.get('rank', index)}, but $.mesh.pp is {mesh['pp']}",
            "write the pipeline rank that holds the stage; the first is 0",
        )
    by_block = data.get("checkpoint_by_block", {})
    require(
        (data["activation_checkpoint"] == MIXED) == bool(by_block),
        f"$.activation_checkpoint is {_shown(data['activation_checkpoint'])}, "
        f"and $.checkpoint_by_block names {len(expanded(by_block, where=where))} blocks",
        f'write "{MIXED}" where checkpoint_by_block says what each block does, and leave that out otherwise',
    )
    of_zero = expanded(data.get("zero_by_block", {}), where=where)
    require(
        not of_zero or data["zero"] == FREED,
        f"$.zero is {data['zero']}, and $.zero_by_block names {len(of_zero)} blocks",
        f"write {FREED} where zero_by_block says what each block does, or leave that out",
    )
    for key, name in (("checkpoint_by_block", "activation_checkpoint"), ("zero_by_block", "zero")):
        values = {*data.get(key, {}).values()}
        require(
            key not in data or len(values) > 1,
            f"$.{key} says {_shown(min(values))} of all blocks" if values else f"$.{key} names no block",
            f"leave it out, and write in $.{name} what all blocks do",
        )
    parts = mesh["dp"] * data["microbatches"]
    require(
        data["batch_size"] % parts == 0,
        f"$.batch_size {data['batch_size']} does not divide over dp={mesh['dp']} x {data['microbatches']} microbatches",
        "choose microbatches that divide batch_size / dp",
    )
    shares = data.get("batch_shares", ())
    reason = refuse_shares(shares, mesh["dp"], data["microbatches"]) if shares else ""
    paces = data.get("dp_paces", ())
    require(
        not paces or (len(paces) == mesh["dp"] and all(len(each) == mesh["pp"] for each in paces)),
        f"$.dp_paces is not of dp={mesh['dp']} x pp={mesh['pp']} ranks",
        "plan again, or leave dp_paces out",
    )
    require(
        not reason,
        f"$.batch_shares is {_shown(shares)} with {data['microbatches']} microbatches: {reason}",
        "write the microbatches of each dp rank, whose mean is microbatches, or leave batch_shares out",
    )
    require(
        (mesh["pp"] == 1) == (data["schedule"] == "none"),
        f"$.schedule is {_shown(data['schedule'])} with pp={mesh['pp']}",
        'use "none" when pp is 1 and a pipeline schedule when pp is more',
    )


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
