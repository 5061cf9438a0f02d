"""What `autopar diff --fail-on` takes: measures with a limit on their rise, and sections of which any change fails."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .diff import SECTIONS, PlanDiff
from .errors import AutoparError, CheckFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRule:
    """`limit_fraction` None: any change of the section fails; otherwise a rise of the measure above it does."""

    name: str
    limit_fraction: float | None


_RULE = re.compile(r"(?P<name>[a-z_]+(?:\.[a-z_]+)?)(?:\s*>\s*(?P<percent>\d+(?:\.\d+)?)\s*%)?")
_MEASURES = ("step_time", "memory", "communication")


def parse_fail_on(text: str) -> tuple[FailRule, ...]:
    """Read "step_time>5%,memory>2%,mesh".

    Raises:
        AutoparError: an unknown name, a measure without a limit, a section with one.
    """
    known = (
        f"measures: {', '.join(f'{m}>5%' for m in _MEASURES)}, communication.AXIS>5%; changes: {', '.join(SECTIONS)}"
    )
    rules = []
    for item in text.split(","):
        match = _RULE.fullmatch(item.strip())
        if match is None:
            raise AutoparError(f"cannot read {item.strip()!r}", where=f"--fail-on {text}", fix=known)
        name, percent = match["name"], match["percent"]
        is_measure = name in _MEASURES or name.startswith("communication.")
        if not is_measure and name not in SECTIONS:
            raise AutoparError(f"unknown name {name!r}", where=f"--fail-on {text}", fix=known)
        if is_measure and percent is None:
            raise AutoparError(f"{name} needs a limit", where=f"--fail-on {text}", fix=f"write {name}>5%")
        if not is_measure and percent is not None:
            raise AutoparError(f"{name} is no number", where=f"--fail-on {text}", fix=f"write {name}: any change fails")
        rules.append(FailRule(name=name, limit_fraction=float(percent) / 100 if percent else None))
    return tuple(rules)


def broken_rules(diff: PlanDiff, rules: Sequence[FailRule]) -> tuple[str, ...]:
    """One line for each rule that the diff breaks."""
    measures = {measure.name: measure for measure in diff.measures}
    found = []
    for rule in rules:
        if rule.limit_fraction is None:
            count = _count(diff, rule.name)
            if count:
                found.append(f"{rule.name}: {count} {'change' if count == 1 else 'changes'}")
            continue
        measure = measures.get(rule.name)  # None: neither plan communicates over that axis
        if measure is None:
            continue
        change = measure.change_fraction
        if change is None or change > rule.limit_fraction:
            rise = "from nothing" if change is None else f"{change:+.1%}"
            found.append(f"{rule.name}: {rise}, limit {rule.limit_fraction * 100:+.4g}%")
    return tuple(found)


def _count(diff: PlanDiff, section: str) -> int:
    if section in ("stages", "tensors", "placements"):
        return len(getattr(diff, section))
    return sum(change.section == section for change in diff.settings)


def check_fail_on(diff: PlanDiff, rules: Sequence[FailRule]) -> None:
    """Raise where the diff breaks a rule.

    Raises:
        CheckFailed: names every broken rule.
    """
    broken = broken_rules(diff, rules)
    if broken:
        raise CheckFailed(
            "the plans differ more than --fail-on allows",
            where="; ".join(broken),
            fix="accept the new plan, or change what made it differ",
        )
