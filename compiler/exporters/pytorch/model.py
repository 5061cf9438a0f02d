"""sharded_model.py: header, constants, classes, and the functions that build a stage and run a step."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....planner.capture.graph import Value
from ...lower import LoweredModel, local_output
from ...source import comment, layout, literal, quote
from . import functions
from .classes import Options, Writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who wrote the file from what, for its header. Free text: it ends up in a docstring, made safe here."""

    version: str
    source: str  # "gpt.py:build"
    plan: str  # fingerprint


def render_model(
    model: LoweredModel, options: Options, provenance: Provenance, runtime_names: frozenset[str]
) -> tuple[str, frozenset[str]]:
    """The text of sharded_model.py, and the runtime functions that it calls.

    `runtime_names`: every function that may be imported from collectives.py.
    """
    writer = Writer(model, options, runtime_names)
    classes = "\n\n\n".join(_classes(writer))
    body = "\n\n\n".join([classes, *_functions(writer)])
    used = _names(body)
    calls = frozenset(used & runtime_names)
    header = [*_docstring(writer, provenance), "", *_imports(used, options, model), *_runtime_import(calls)]
    return "\n".join(header) + "\n" + "\n".join(_constants(writer)) + "\n\n\n" + body + "\n", calls


def _docstring(writer: Writer, provenance: Provenance) -> list[str]:
    mesh = writer.mesh
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.sizes.items() if size > 1) or "one rank"
    policy = [f"{mesh.microbatches} microbatches"] if mesh.microbatches > 1 else []
    policy += [writer.options.schedule] if mesh.pp > 1 else []
    policy += [f"ZeRO-{writer.options.zero}"] if mesh.dp > 1 else []
    policy += [f"activation checkpointing {writer.options.activation_checkpoint}"] * (
        writer.options.activation_checkpoint != "none"
    )
    title = f"{writer.graph.name} on {mesh.world_size} ranks: {', '.join((sizes, *policy))}."
    lines = [
        f'"""{_text(title)}',
        "",
        f"Written by autopar {_text(provenance.version)} from {_text(provenance.source)}.",
        f"Plan {_text(provenance.plan)}. It needs PyTorch only; edit freely.",
        "",
        "Forward passes run on local tensors. A comment such as `S(1) -> R / reduce_scatter` stands where a value",
        "changes its placement on a mesh axis, and says what happens to its gradient: S(i) is split on dim i, R is",
        "replicated, P is a sum over ranks that has not been taken.",
        '"""',
    ]
    return ["# SPDX-License-Identifier: Apache-2.0", *lines]


def _text(value: str) -> str:
    """Free text inside the docstring."""
    return comment(value).replace("\\", "/").replace('"', "'")


def _names(body: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}


def _imports(used: set[str], options: Options, model: LoweredModel) -> Iterator[str]:
    tensor = [name for name in ("DTensor", "Replicate", "Shard", "distribute_tensor") if name in used]
    mesh = [name for name in ("DeviceMesh", "init_device_mesh") if name in used]
    fsdp = [name for name in ("FSDPModule", "fully_shard") if name in used]
    schedules = [name for name in ("Schedule1F1B", "ScheduleGPipe") if name in used]
    context = [name for name in ("contextmanager", "nullcontext") if name in used]
    if context:
        yield "from collections.abc import Iterator"
        yield f"from contextlib import {', '.join(context)}"
        yield ""
    for name, line in (
        ("torch", "import torch"),
        ("dist", "import torch.distributed as dist"),
        ("F", "import torch.nn.functional as F"),
        ("nn", "from torch import nn"),
    ):
        if name in used:
            yield line
    for module, names in (
        ("torch.distributed.device_mesh", mesh),
        ("torch.distributed.fsdp", fsdp),
        ("torch.distributed.pipelining", [*(["PipelineStage"] if schedules else []), *schedules]),
        ("torch.distributed.tensor", tensor),
        ("torch.utils.checkpoint", ["checkpoint"] if "checkpoint" in used else []),
    ):
        if names:
            yield f"from {module} import {', '.join(names)}"


def _runtime_import(calls: frozenset[str]) -> list[str]:
    return ["", *layout_import(sorted(calls)), ""] if calls else [""]


def layout_import(names: Sequence[str]) -> list[str]:
    line = f"from collectives import {', '.join(names)}"
    if len(line) <= 120:
        return [line]
    return ["from collectives import (", *(f"    {name}," for name in names), ")"]


def _constants(writer: Writer) -> Iterator[str]:
    mesh = writer.mesh
    yield f"PP, DP, TP = {mesh.pp}, {mesh.dp}, {mesh.tp}"
    yield f"MICROBATCHES = {mesh.microbatches}"
    if mesh.dp > 1:
        yield f"ZERO = {writer.options.zero}"
    if mesh.pp > 1 and writer.model.ties:
        inner = ", ".join(f"{quote(fqn)}: {literal(stages)}" for fqn, stages in writer.model.ties)
        yield "# Parameters that several stages hold, and which; their gradients are added up over these stages."
        yield from layout(f"TIED = {{{inner}}}", "")


def _classes(writer: Writer) -> Iterator[str]:
    if any(True for stage in writer.model.stages for _ in stage.tensors):
        yield functions.parameter(tp=writer.mesh.tp > 1)
    if writer.mesh.tp > 1:
        yield functions.LOCAL
    stages = [writer.stage_class(stage) for stage in writer.model.stages]
    blocks: list[str] = []
    for template in writer.blocks:
        stage = next(
            (s for s in writer.model.stages if any(run.template == template for run in s.runs)), writer.model.stages[0]
        )
        blocks.append(writer.block_class(template, {tensor.fqn: tensor for tensor in stage.tensors}))
    texts = (*blocks, *stages)
    if any("Weights(" in text or "(Weights)" in text for text in texts):
        by_name = any("(Weights)" in text or "**{" in text for text in texts)
        yield functions.weights(by_name=by_name)
    yield from blocks
    yield from stages
    if any("recomputed(" in text for text in stages):
        yield functions.RECOMPUTED


def _functions(writer: Writer) -> Iterator[str]:
    mesh, options, model = writer.mesh, writer.options, writer.model
    fsdp = mesh.dp > 1 and options.zero >= 2
    yield functions.build_mesh(mesh)
    yield functions.build_stage(
        stages=[writer.stage_name(index) for index in range(mesh.pp)],
        fsdp=fsdp,
        blocks=[writer.blocks[template] for template in writer.blocks] if fsdp else [],
        tied=bool(model.ties) and mesh.pp > 1,
    )
    fused = any(tensor.fused_dim is not None for stage in model.stages for tensor in stage.tensors)
    distributed = mesh.tp > 1 or fsdp
    yield functions.state_dicts(distributed=distributed, fused=fused)
    if mesh.microbatches > 1:
        yield functions.split_microbatches(groups=writer.has_groups())
    if mesh.pp > 1:
        yield _pipeline(writer)
    yield functions.train_step(
        pp=mesh.pp,
        microbatches=mesh.microbatches,
        fsdp=fsdp,
        random=any(writer.uses_random(index) for index in range(len(writer.graph.templates))),
        reduce=bool(writer.reduced_axes()) or bool(model.ties and mesh.pp > 1),
        updates=_updates(writer),
        loss_condition=_loss_condition(writer),
        world=mesh.world_size,
    )
    if _updates(writer):
        yield functions.UPDATE_BUFFERS
    reduced = [axis for axis in writer.reduced_axes() if _has_partial(writer, axis)]
    if writer.reduced_axes() or (model.ties and mesh.pp > 1):
        yield functions.reduce_gradients(reduced, tied=bool(model.ties) and mesh.pp > 1, distributed=distributed)
    yield functions.clip_gradients(
        distributed=distributed,
        replicated_dp=mesh.dp > 1 and not fsdp,
        tied=bool(model.ties) and mesh.pp > 1,
        world=mesh.world_size,
    )


def _has_partial(writer: Writer, axis: str) -> bool:
    return any(axis in tensor.partial for stage in writer.model.stages for tensor in stage.tensors)


def _updates(writer: Writer) -> bool:
    return any(template.buffer_updates for template in writer.graph.templates)


def _loss_condition(writer: Writer) -> str:
    """Which ranks add their part of the loss: the last stage, and where the loss is whole on an axis its first rank."""
    mesh = writer.mesh
    parts = [f'mesh["pp"].get_local_rank() == {mesh.pp - 1}'] if mesh.pp > 1 else []
    for axis in ("dp", "tp"):
        if mesh.sizes[axis] > 1 and axis not in writer.model.loss_axes:
            parts.append(f'mesh["{axis}"].get_local_rank() == 0')
    return " and ".join(parts)


def _pipeline(writer: Writer) -> str:
    """The function that wraps a stage for torch's schedule, with the shapes that cross its edges."""
    received: list[str] = []
    sent: list[str] = []
    for stage in writer.model.stages:
        received.append(_shapes(writer, stage.received))
        sent.append(_shapes(writer, stage.sent if stage.index < writer.mesh.pp - 1 else (writer.graph.loss,)))
    return functions.pipeline(received, sent, schedule=writer.options.schedule)


def _shapes(writer: Writer, values: Sequence[Value]) -> str:
    parts: list[str] = []
    for value in values:
        local = local_output(writer.program, value)
        arguments = [*map(str, local.shape)]
        arguments += [] if local.dtype == "float32" else [f"dtype=torch.{local.dtype}"]
        arguments += [] if local.requires_grad else ["requires_grad=False"]
        parts.append(f"tensor({', '.join(arguments)})")
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
