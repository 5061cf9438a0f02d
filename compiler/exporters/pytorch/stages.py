"""Classes of the pipeline stages as text; stages that differ only in the numbers of their layers share one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ....cost_models.units import format_seconds
from ...held import HeldTensor
from ...lower import StageProgram
from ...text import comment, layout, literal, quote
from .blocks import class_data, handle_lines, signature
from .forward import forward_lines, prepare_lines, prepared_values
from .modules import Modules
from .tensors import Tree, assignments, base_class, creation


def stage_classes(modules: Modules) -> tuple[dict[str, str], tuple[str, ...]]:
    """Class name -> text in order, and the class of each stage."""
    stages = modules.model.stages
    if len(stages) == 1:
        return {"Stage": _stage_class(modules, stages[0], "Stage", _described(modules, stages))}, ("Stage",)
    bodies = [_stage_class(modules, stage, "", "") for stage in stages]
    middles = list(dict.fromkeys(bodies[1:-1]))
    names: list[str] = []
    for stage, body in zip(stages, bodies, strict=True):
        if stage.index in (0, len(stages) - 1):
            names.append("LastStage" if stage.index else "FirstStage")
        else:
            names.append("MiddleStage" if len(middles) == 1 else f"Stage{1 + bodies[1:-1].index(body)}")
    texts: dict[str, str] = {}
    for name in dict.fromkeys(names):
        alike = [stage for stage, other in zip(stages, names, strict=True) if other == name]
        texts[name] = _stage_class(modules, alike[0], name, _described(modules, alike))
    return texts, tuple(names)


def _stage_class(modules: Modules, stage: StageProgram, name: str, described: str) -> str:
    outside = modules.outside(stage)
    prepare = prepare_lines(modules, stage)
    arguments, forward = forward_lines(modules, stage)
    tree = _tree(modules, stage, outside)
    layers = ", layers: range" if modules.layers else ""
    text = [f"class {name}({base_class(tree)}):", f'    """{comment(described)}."""', ""]
    text += class_data(modules, outside)
    text += _batch_dims(modules, stage)
    text += [f"    def __init__(self, mesh: DeviceMesh{layers}):", "        super().__init__()"]
    text += handle_lines(modules, [*forward, *prepare])
    text += [*assignments(tree, "        "), "", *prepare, ""]
    text += signature("forward", [*arguments, "microbatch"])
    text += _preamble(forward)
    return "\n".join([*text, *forward])


def _described(modules: Modules, stages: Sequence[StageProgram]) -> str:
    """Which stages, what they hold, and what they are predicted to take where no constant says so."""
    names: dict[str, None] = {}
    for unit in (modules.graph.units[i] for stage in stages for i in range(stage.first, stage.last)):
        names[f"layers of {unit.fqn.rpartition('.')[0]}" if modules.in_layers(unit) else unit.fqn] = None
    held = [name for name in names if name]
    inside = " to ".join((held[0], held[-1])) if len(held) > 3 else ", ".join(held)
    first, last = stages[0].index, stages[-1].index
    where = f"Stage {first}" if first == last else f"Stages {first} {'and' if last == first + 1 else 'to'} {last}"
    where = where if modules.is_pipeline else "The whole model"
    seconds = modules.options.stage_seconds
    predicted = "" if modules.layers or not seconds else f"; predicted {format_seconds(seconds[first])} per microbatch"
    return f"{where}: {inside}{predicted}" if inside else f"{where}{predicted}"


def _preamble(lines: Sequence[str]) -> Iterator[str]:
    source = "\n".join(lines)
    if "values[" in source:
        yield "        values = self.microbatches[int(microbatch)]"
    if re.search(r"\bat\b", source):
        yield "        at = (self.step, int(microbatch))"
    if "device=device" in source:
        yield "        device = next(self.parameters()).device"


def _tree(modules: Modules, stage: StageProgram, outside: Mapping[str, HeldTensor]) -> Tree:
    """The modules of a stage in the order of the user's FQNs as they are met."""
    tree = Tree()
    for fqn, tensor in outside.items():
        tree.put(fqn.split("."), creation(tensor, modules.parameter_axes))
    for index in range(stage.first, stage.last):
        unit = modules.graph.units[index]
        if unit.template not in modules.blocks:
            continue
        name = modules.blocks[unit.template]
        random = modules.uses_random(unit.template) and not modules.counts_calls(unit.template)
        if modules.layers and modules.in_layers(unit):
            offset = modules.layers.offset
            number = (", number=i" + (f" + {offset}" if offset else "")) if random else ""
            block = f"nn.ModuleDict({{str(i): {name}(mesh{number}) for i in layers}})"
            tree.put(modules.layers.parent.split("."), block)
        else:
            tree.put(unit.fqn.split("."), f"{name}(mesh{f', number={index}' if random else ''})")
    return tree


def _batch_dims(modules: Modules, stage: StageProgram) -> list[str]:
    if modules.mesh.microbatches == 1:
        return []
    groups = has_groups(modules)
    slices = {name: edge.batch for name, edge in prepared_values(modules, stage).items() if edge.batch is not None}
    inner = ", ".join(f"{quote(name)}: {literal(batch if groups else batch[0])}" for name, batch in slices.items())
    if not slices:
        return ["    batch_dims = {}", ""]
    note = "dim (and number of runs in it)" if groups else "dim"
    return [
        f"    # {note} of each value along which the microbatches are cut; other values are alike in all of them",
        *layout(f"batch_dims = {{{inner}}}", "    "),
        "",
    ]


def has_groups(modules: Modules) -> bool:
    """Whether some value is cut into microbatches within several runs of a dim."""
    return any(
        edge.batch is not None and edge.batch[1] > 1
        for stage in modules.model.stages
        for edge in prepared_values(modules, stage).values()
    )


__all__ = ["has_groups", "stage_classes"]
