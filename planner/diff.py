"""Two plans -> what differs, in a plan's own words: mesh, schedule, stages, tensors by FQN, placements, predictions.

FQN patterns over repeated blocks are expanded by the blocks that each plan's stages hold, compared name by name, and
folded again where a run of blocks changes alike, so a deeper model or a block planned by itself shows as just that.
Mesh axes are compared by name; an axis that a plan lacks has size 1.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

from .checkpointing import described
from .fqn_patterns import expand, natural
from .plan import Plan, StagePlan
from .sharding.mesh import described_shares, ordered
from .zero import zero_text

DIFF_SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting; `section` is the word that `--fail-on` takes for it."""

    section: str
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChange:
    """What a pipeline stage holds; empty where the plan has no such stage."""

    stage: int
    old: tuple[str, ...]
    new: tuple[str, ...]


class TensorEvent(Enum):
    ADDED = "added"
    REMOVED = "removed"
    RESIZED = "resized"
    MOVED = "moved"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorChange:
    """A parameter, or the same parameter of several blocks. A resized one may have another placement too."""

    fqn: str  # "h.{4..7}.mlp.c_fc.weight"
    event: TensorEvent
    old_shape: tuple[int, ...] | None
    new_shape: tuple[int, ...] | None
    old_placement: str  # "tp S(0)", "whole", "" where the plan has no such tensor
    new_placement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChange:
    """How an operation is split on one mesh axis; "none" where it is computed alike, or the axis is of size 1."""

    template: str
    node: str
    axis: str
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A predicted number. `change_fraction` is new / old - 1, None where old is 0 and new is not."""

    name: str  # "step_time", "memory", "communication", "communication.tp"
    unit: str  # "seconds" | "bytes"
    old: float
    new: float

    @property
    def change_fraction(self) -> float | None:
        if self.old == self.new:
            return 0.0
        return self.new / self.old - 1 if self.old else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    settings: tuple[SettingChange, ...]
    stages: tuple[StageChange, ...]
    tensors: tuple[TensorChange, ...]
    placements: tuple[PlacementChange, ...]
    measures: tuple[Measure, ...]  # all of them, changed or not

    @property
    def is_same_decision(self) -> bool:
        """Whether both plans decide the same; predictions may differ."""
        return not (self.settings or self.stages or self.tensors or self.placements)

    @property
    def is_empty(self) -> bool:
        return self.is_same_decision and all(measure.old == measure.new for measure in self.measures)


def diff_plans(old: Plan, new: Plan) -> PlanDiff:
    """Compare two plans. Versions, fingerprints, pins, runner-ups and solver reports are no decisions and left out."""
    return PlanDiff(
        settings=tuple(_settings(old, new)),
        stages=_stages(old, new),
        tensors=_tensors(old, new),
        placements=_placements(old, new),
        measures=_measures(old, new),
    )


# Sections of --fail-on that hold settings, beside "mesh": the attributes of Plan that they show.
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "model": ("model",),
    "cluster": ("cluster", "cluster_overrides", "gpus", "stack"),
    "batch": ("batch_size", "microbatches", "batch_shares"),
    "schedule": ("schedule", "stages_per_rank"),
    "zero": ("zero", "zero_shard_size"),
    "activation_checkpoint": ("activation_checkpoint",),
    "precision": ("precision",),
    "optimizer": ("optimizer",),
}
SECTIONS = ("mesh", *_SETTINGS, "stages", "tensors", "placements")


def _settings(old: Plan, new: Plan) -> Iterable[SettingChange]:
    for axis in ordered({**old.mesh, **new.mesh}):
        sizes = old.mesh.get(axis, 1), new.mesh.get(axis, 1)
        if sizes[0] != sizes[1]:
            yield SettingChange(section="mesh", name=axis, old=str(sizes[0]), new=str(sizes[1]))
    for section, names in _SETTINGS.items():
        for name in names:
            before, after = _setting(old, name), _setting(new, name)
            if before != after:
                yield SettingChange(section=section, name=name, old=before, new=after)


def _setting(plan: Plan, name: str) -> str:
    if name == "cluster_overrides":
        return " ".join(f"{key}={value:g}" for key, value in sorted(plan.cluster_overrides.items())) or "none"
    if name == "batch_shares":
        return described_shares(plan.batch_shares) or "even"
    if name == "activation_checkpoint" and plan.checkpoint_by_block:
        return described(plan.checkpoint_by_block, names_blocks=True)
    if name == "zero":
        return zero_text(plan.zero, plan.zero_by_block, names_blocks=True)
    if name != "model":
        return str(getattr(plan, name))
    # The path is where the file lies, not what the model is; two checkouts of one model are the same.
    arguments = [f"{key}={json.dumps(value)}" for key, value in sorted(plan.model.arguments.items())]
    inputs = [f"{key}={value}" for key, value in sorted(plan.model.inputs.items())]
    return " ".join([plan.model.name, *arguments, *inputs])


def _stages(old: Plan, new: Plan) -> tuple[StageChange, ...]:
    found = []
    for index in range(max(len(old.stages), len(new.stages))):
        before = old.stages[index] if index < len(old.stages) else None
        after = new.stages[index] if index < len(new.stages) else None
        old_fqns, new_fqns = before.fqns if before else (), after.fqns if after else ()
        is_cut_elsewhere = before and after and (before.first, before.last) != (after.first, after.last)
        if old_fqns != new_fqns or is_cut_elsewhere:
            found.append(StageChange(stage=index, old=_held(before), new=_held(after)))
    return tuple(found)


def _held(stage: StagePlan | None) -> tuple[str, ...]:
    if stage is None:
        return ()
    return stage.fqns or (f"units {stage.first} to {stage.last - 1}",)


# Tensors: (shape, placement) by full name.
_Tensor = tuple[tuple[int, ...] | None, str]


def _blocks(plan: Plan) -> tuple[str, ...]:
    return tuple(name for stage in plan.stages for pattern in stage.fqns for name in expand(pattern))


def _named_tensors(plan: Plan) -> dict[str, _Tensor]:
    """Every tensor of a plan by full name. A pattern without known blocks keeps its star."""
    blocks = _blocks(plan)
    patterns = sorted({*plan.tensors, *plan.tensor_shapes}, key=lambda pattern: (pattern.count("*"), pattern))
    found: dict[str, _Tensor] = {}
    for pattern in patterns:  # exact names first: they win over patterns that match them too
        # R and R/P both hold the tensor whole; how its gradient is summed shows in the placements.
        pairs = sorted((axis, pair) for axis, pair in plan.tensors.get(pattern, {}).items() if pair.startswith("S"))
        placement = ", ".join(f"{axis} {pair}" for axis, pair in pairs) or "whole"
        for name in _matches(pattern, blocks):
            found.setdefault(name, (plan.tensor_shapes.get(pattern), placement))
    return found


def _matches(pattern: str, blocks: Sequence[str]) -> tuple[str, ...]:
    if "*" not in pattern:
        return (pattern,)
    # "h.*.attn.weight": the blocks h.0, h.1 ... that its part up to the star names.
    head, tail = pattern.split("*", 1)
    numbers = {name[len(head) :].split(".", 1)[0] for name in blocks if name.startswith(head)}
    names = [f"{head}{number}{tail}" for number in sorted((n for n in numbers if n.isdigit()), key=int)]
    return tuple(name for item in names for name in _matches(item, blocks)) if names else (pattern,)


def _tensors(old: Plan, new: Plan) -> tuple[TensorChange, ...]:
    before, after = _named_tensors(old), _named_tensors(new)
    changes: dict[str, tuple[TensorEvent, _Tensor | None, _Tensor | None]] = {}
    for name in sorted({*before, *after}, key=natural):
        one, two = before.get(name), after.get(name)
        if one == two:
            continue
        if one is None or two is None:
            event = TensorEvent.ADDED if one is None else TensorEvent.REMOVED
        else:
            event = TensorEvent.RESIZED if one[0] != two[0] else TensorEvent.MOVED
        changes[name] = event, one, two
    return tuple(
        TensorChange(
            fqn=name,
            event=event,
            old_shape=one[0] if one else None,
            new_shape=two[0] if two else None,
            old_placement=one[1] if one else "",
            new_placement=two[1] if two else "",
        )
        for name, (event, one, two) in _folded(changes)
    )


_Change = tuple[TensorEvent, _Tensor | None, _Tensor | None]


def _folded(changes: Mapping[str, _Change]) -> list[tuple[str, _Change]]:
    """Runs of names that differ in their first number only and change alike, as one "h.{4..7}" entry."""
    groups: dict[tuple[str, str, _Change], list[int]] = defaultdict(list)
    for name, change in changes.items():
        parts = name.split(".")
        where = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if where is None:
            groups[name, "", change].append(-1)
        else:
            head, tail = ".".join([*parts[:where], ""]), ".".join(["", *parts[where + 1 :]])
            groups[head, tail, change].append(int(parts[where]))
    found = []
    for (head, tail, change), numbers in groups.items():
        for first, last in _runs(numbers):
            middle = "" if first < 0 else str(first) if first == last else f"{{{first}..{last}}}"
            found.append((f"{head}{middle}{tail}", change))
    return found


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def _placements(old: Plan, new: Plan) -> tuple[PlacementChange, ...]:
    found = []
    for template in sorted({*old.placements, *new.placements}):
        # A template that computes everything alike is left out of a plan.
        before, after = old.placements.get(template, {}), new.placements.get(template, {})
        for node in sorted({*before, *after}):
            one, two = before.get(node, {}), after.get(node, {})
            for axis in sorted({*one, *two}):
                labels = one.get(axis, "none"), two.get(axis, "none")
                if labels[0] != labels[1]:
                    found.append(PlacementChange(template=template, node=node, axis=axis, old=labels[0], new=labels[1]))
    return tuple(found)


def _measures(old: Plan, new: Plan) -> tuple[Measure, ...]:
    def measure(name: str, unit: str, of: Callable[[Plan], float]) -> Measure:
        return Measure(name=name, unit=unit, old=of(old), new=of(new))

    axes = sorted({c.axis for plan in (old, new) for c in plan.collectives})
    return (
        measure("step_time", "seconds", lambda plan: plan.step_seconds),
        measure("memory", "bytes", lambda plan: max(memory["total"] for memory in plan.memory_by_rank)),
        measure("communication", "bytes", communication_bytes),
        *(measure(f"communication.{a}", "bytes", lambda plan, a=a: communication_bytes(plan, axis=a)) for a in axes),
    )


def communication_bytes(plan: Plan, *, axis: str | None = None) -> int:
    """Payload that collectives move in a step, of the pipeline rank that moves most."""
    by_stage: dict[int, int] = defaultdict(int)
    for use in plan.collectives:
        if axis is None or use.axis == axis:
            by_stage[use.stage] += use.count * use.num_bytes
    return max(by_stage.values(), default=0)


def diff_to_json(diff: PlanDiff) -> str:
    """One JSON object; measures carry their relative change."""
    data = asdict(diff)
    for change in data["tensors"]:
        change["event"] = change["event"].value
    for measure, entry in zip(diff.measures, data["measures"], strict=True):
        entry["change_fraction"] = measure.change_fraction
    return json.dumps({"schema_version": DIFF_SCHEMA_VERSION, **data}, indent=2) + "\n"
