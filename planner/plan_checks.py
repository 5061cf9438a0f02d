"""A parsed plan.json -> the first thing in it that is no plan, with what to write instead."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from .blocks import expanded
from .checkpointing import MIXED
from .errors import AutoparError
from .plan import SCHEMA_VERSION
from .sharding.mesh import refuse_shares
from .zero import FREED

# A parsed JSON value; the checks below narrow it.
Json = Any


def check_version(data: Json, where: str) -> None:
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


def check_schema(data: Json, where: str) -> None:
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


def shown(value: Json) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _explain(validator: str, allowed: Json, instance: Json, rule: Json) -> tuple[str, str]:
    """What is wrong with `instance`, and what to write instead, for the keywords that our schema uses."""
    value = shown(instance)
    if validator == "enum":
        choices = ", ".join(shown(choice) for choice in allowed)
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
    return f"is {value}, which breaks {validator} {shown(allowed)}", "mend it, or plan again"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def check_facts(data: Json, where: str) -> None:
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
        f"$.activation_checkpoint is {shown(data['activation_checkpoint'])}, "
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
            f"$.{key} says {shown(min(values))} of all blocks" if values else f"$.{key} names no block",
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
        f"$.batch_shares is {shown(shares)} with {data['microbatches']} microbatches: {reason}",
        "write the microbatches of each dp rank, whose mean is microbatches, or leave batch_shares out",
    )
    require(
        (mesh["pp"] == 1) == (data["schedule"] == "none"),
        f"$.schedule is {shown(data['schedule'])} with pp={mesh['pp']}",
        'use "none" when pp is 1 and a pipeline schedule when pp is more',
    )


__all__ = ["Json", "check_facts", "check_schema", "check_version", "schema", "shown"]
