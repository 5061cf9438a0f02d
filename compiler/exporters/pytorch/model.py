"""sharded_model.py: header, constants, classes, and the functions that build a stage and run a step."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from ....cost_models.units import format_seconds
from ....planner.capture.graph import Value
from ....planner.checkpointing import described
from ....planner.fqn_patterns import expand, fold
from ....planner.schedules import get_schedule, schedule_names
from ....planner.search.step_collectives import is_partial, loss_axes, reduced_axes
from ....planner.sharding.mesh import described_shares
from ....planner.zero import FREED, zero_text
from ...held import HeldTensor
from ...lower import LoweredModel, local_output
from ...text import LINE_WIDTH, comment, layout, literal, numbers, quote
from . import meshes, module_functions, pipeline_functions, step_functions, zero1_functions
from .blocks import block_class
from .modules import Modules
from .options import Options
from .stages import has_groups, stage_classes
from .tensors import DEFAULT_DTYPE

_MOST_SHOWN = 8  # stages whose seconds are listed one by one


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
    modules = Modules(model, options, runtime_names)
    classes, stage_names = stage_classes(modules)
    body = "\n\n\n".join([*_classes(modules, classes), *_functions(modules, stage_names, classes)])
    used = _names(body)
    calls = frozenset(used & runtime_names)
    header = [*_docstring(modules, provenance), "", *_imports(used), *_runtime_import(calls)]
    return "\n".join(header) + "\n" + "\n".join(_constants(modules)) + "\n\n\n" + body + "\n", calls


def _docstring(modules: Modules, provenance: Provenance) -> list[str]:
    mesh, options = modules.mesh, modules.options
    sizes = " x ".join(f"{name}={size}" for name, size in mesh.sizes.items() if size > 1) or "one rank"
    policy = [f"{described_shares(mesh.shares) or mesh.microbatches} microbatches"] if mesh.microbatches > 1 else []
    several = f" with {len(options.rank_stages[0])} stages per rank" if len(options.rank_stages[0]) > 1 else ""
    policy += [f"{options.schedule}{several}"] if mesh.pp > 1 else []
    within = f" within groups of {mesh.shards}" if mesh.replicas > 1 else ""
    policy += [f"ZeRO-{zero_text(options.zero, options.zero_by_block)}{within}"] if mesh.state_ranks > 1 else []
    if options.activation_checkpoint != "none":
        mixed = described(options.checkpoint_by_block)
        policy.append(mixed or f"activation checkpointing {options.activation_checkpoint}")
    title = f"{modules.graph.name} on {mesh.world_size} ranks: {', '.join((sizes, *policy))}."
    lines = [
        *wrap(f'"""{_text(title)}', LINE_WIDTH, break_long_words=False, break_on_hyphens=False),
        "",
        f"Written by autopar {_text(provenance.version)} from {_text(provenance.source)}.",
        f"Plan {_text(provenance.plan)}. It needs PyTorch only; edit freely.",
        *_predicted(options),
        "",
        "Forward passes run on local tensors. A comment such as `S(1) -> R / reduce_scatter` stands where a value",
        "changes its placement on a mesh axis, and says what happens to its gradient: S(i) is split on dim i, R is",
        "replicated, P is a sum over ranks that has not been taken.",
        '"""',
    ]
    return ["# SPDX-License-Identifier: Apache-2.0", *lines]


def _predicted(options: Options) -> Iterator[str]:
    """What the plan says that a step takes, and where."""
    parts = {name: seconds for name, seconds in options.step_seconds.items() if seconds > 0}
    if parts:
        inside = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items())
        yield f"Predicted step: {format_seconds(sum(parts.values()))} ({inside})."


def _spread(options: Options) -> str:
    """How long the stages take, each where they are few."""
    seconds = options.stage_seconds
    if not seconds:
        return ""
    if len(seconds) > _MOST_SHOWN:
        return f"; predicted {format_seconds(min(seconds))} to {format_seconds(max(seconds))} per microbatch"
    return f"; predicted {', '.join(map(format_seconds, seconds))} per microbatch"


def _text(value: str) -> str:
    """Free text inside the docstring."""
    return comment(value).replace("\\", "/").replace('"', "'")


def _names(body: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}


def _imports(used: set[str]) -> Iterator[str]:
    tensor = [name for name in ("DTensor", "Replicate", "Shard", "distribute_tensor") if name in used]
    mesh = [name for name in ("DeviceMesh", "init_device_mesh") if name in used]
    fsdp = [name for name in ("FSDPModule", "fully_shard") if name in used]
    schedules = sorted({get_schedule(name).torch_class for name in schedule_names()} & used)
    standard = [
        f"from {module} import {', '.join(found)}"
        for module, names in (
            ("collections.abc", ("Iterable", "Iterator")),
            ("contextlib", ("AbstractContextManager", "contextmanager", "nullcontext")),
        )
        if (found := [name for name in names if name in used])
    ]
    yield from [*standard, ""] if standard else []
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
        (
            "torch.utils.checkpoint",
            [name for name in ("checkpoint", "create_selective_checkpoint_contexts") if name in used],
        ),
    ):
        if names:
            yield f"from {module} import {', '.join(names)}"


def _runtime_import(calls: frozenset[str]) -> list[str]:
    return ["", *layout_import(sorted(calls)), ""] if calls else [""]


def layout_import(names: Sequence[str]) -> list[str]:
    line = f"from collectives import {', '.join(names)}"
    if len(line) <= LINE_WIDTH:
        return [line]
    return ["from collectives import (", *(f"    {name}," for name in names), ")"]


def _constants(modules: Modules) -> Iterator[str]:
    mesh, options = modules.mesh, modules.options
    sizes = mesh.written
    yield f"{', '.join(map(str.upper, sizes))} = {', '.join(map(str, sizes.values()))}"
    if modules.joins_states:
        yield "DP_CP = DP * CP  # ranks that hold the same parameters: ZeRO splits states over all of them"
    if mesh.replicas > 1:
        yield f"REPLICAS = {mesh.replicas}  # groups of dp ranks that each hold all shards of the parameters"
    if mesh.shares:
        yield from layout(f"BATCH_SHARES = {numbers(mesh.shares)}", "", "microbatches of each dp rank, all of one size")
    elif mesh.microbatches > 1 or modules.is_pipeline:
        yield f"MICROBATCHES = {mesh.microbatches}"
    if modules.has_several_stages:
        yield from layout(f"RANK_STAGES = {literal(options.rank_stages)}", "", "the stages of each pipeline rank")
    if modules.layers:
        ranges = ", ".join(
            f"range({last})" if first == 0 else f"range({first}, {last})" for first, last in modules.layers.ranges
        )
        yield from layout(f"STAGE_LAYERS = ({ranges})", "", f"of {modules.layers.parent}{_spread(options)}")
    if modules.looked_up:
        yield "# Blocks that the backward computes again instead of keeping what they save."
        for policy in ("full", "selective"):
            units = [
                modules.graph.units[index].fqn for index in modules.looked_up if modules.policy_of(index) == policy
            ]
            if units:
                yield from layout(f"{policy.upper()} = {_set_of(units)}", "")
    if modules.kept_blocks:
        yield "# Blocks that keep their gathered parameters from forward to backward; the others gather them again."
        yield from layout(f"ZERO_2 = {_set_of(modules.kept_blocks)}", "")
    if modules.keeps_results:
        yield "# Results that checkpointed blocks keep: these kernels do many operations for each byte that they write."
        kernels = ", ".join(f"torch.ops.{kernel}" for kernel in modules.kept_kernels)
        yield from layout(f"KEPT = [{kernels}]", "")
    if modules.has_ties:
        inner = ", ".join(f"{quote(fqn)}: {literal(stages)}" for fqn, stages in modules.model.ties)
        yield "# Parameters that several stages hold, and which; their gradients are added up over these stages."
        yield from layout(f"TIED = {{{inner}}}", "")


def _set_of(blocks: Iterable[str]) -> str:
    """The set of some blocks' names, as source."""
    items: list[str] = []
    for pattern in fold(dict.fromkeys(blocks)):
        names = expand(pattern)
        if len(names) == 1:
            items.append(quote(names[0]))
            continue
        parent, first = names[0].rpartition(".")[::2]
        numbers = f"{first}, {int(first) + len(names)}" if int(first) else str(len(names))
        items.append(f"*(f{quote(parent + '.{i}')} for i in range({numbers}))")
    return f"{{{', '.join(items)}}}"


def _classes(modules: Modules, stages: Mapping[str, str]) -> Iterator[str]:
    held = [tensor for stage in modules.model.stages for tensor in stage.tensors]
    if any(not tensor.is_buffer for tensor in held):
        made = [t for t in held if not t.is_buffer or t.splits]
        dtype = any(t.type.dtype != DEFAULT_DTYPE for t in made)
        frozen = any(not t.type.requires_grad for t in made)
        yield module_functions.parameter(axes=modules.parameter_axes, dtype=dtype, frozen=frozen)
        if modules.parameter_axes:
            yield module_functions.local(partial=any(axis != "dp" for axis in modules.reduced_axes))
    blocks: list[str] = []
    for template in modules.blocks:
        stage = next(s for s in modules.model.stages if any(run.template == template for run in s.runs))
        blocks.append(block_class(modules, template, {tensor.fqn: tensor for tensor in stage.tensors}))
    texts = (*blocks, *stages.values())
    if any("Weights(" in text or "(Weights)" in text for text in texts):
        by_name = any("(Weights)" in text or "**{" in text for text in texts)
        has_self = any(re.search(r"\bself=", text) for text in texts)
        yield module_functions.weights(by_name=by_name, has_self=has_self)
    yield from texts
    if modules.keeps_results:
        yield module_functions.KEEP_RESULTS
    if modules.looked_up:
        found = {modules.policy_of(index) for index in modules.looked_up}
        calls = {
            policy: modules.recomputed_call("block, *inputs", policy, updates=modules.spares_looked_up)
            for policy in sorted(found - {"none"})
        }
        yield module_functions.run_block(calls)
    if policies := modules.sparing_policies:
        yield module_functions.recomputed(policies, splits_backward=modules.splits_backward)


def _functions(modules: Modules, stage_names: Sequence[str], stages: Mapping[str, str]) -> Iterator[str]:
    mesh, options, model = modules.mesh, modules.options, modules.model
    yield meshes.build_mesh(mesh)
    if modules.joins_ranks:
        yield meshes.STATES_MESH
    dtypes = {t.type.dtype for stage in model.stages for t in stage.tensors if not t.is_buffer}
    if modules.has_shards:
        yield zero1_functions.shards(modules.parameter_axes, over=mesh.state_axis)
        several = modules.has_several_stages
        yield zero1_functions.OPTIMIZED_OF_SEVERAL if several else zero1_functions.OPTIMIZED
    yield module_functions.build_stage(
        stages=stage_names,
        zero=options.zero if modules.has_fsdp or modules.has_shards else None,
        over=mesh.state_axis,
        replicas=mesh.replicas,
        blocks=list(modules.blocks.values()),
        layers=modules.layers is not None,
        named=bool(modules.looked_up),
        keeps_some=bool(modules.kept_blocks),
        tied=modules.has_ties and max(modules.tie_ranks) > 1,
        several=modules.has_several_stages,
    )
    reshaped = any(tensor.shape != tensor.type.shape for stage in model.stages for tensor in stage.tensors)
    yield module_functions.state_dicts(distributed=modules.has_dtensors, shards=modules.has_shards, reshaped=reshaped)
    if mesh.shares:
        yield step_functions.NUM_MICROBATCHES
    if mesh.microbatches > 1:
        yield step_functions.split_microbatches(groups=has_groups(modules), shares=bool(mesh.shares))
    if modules.is_pipeline:
        yield _pipeline(modules)
    reduces = bool(modules.reduced_axes) or modules.has_ties or modules.has_shards
    yield step_functions.train_step(
        pp=mesh.pp,
        num_stages=len(model.stages) if modules.has_several_stages else None,
        microbatches=mesh.microbatches,
        shares=bool(mesh.shares),
        fsdp=modules.has_fsdp,
        random=any(re.search(r"\bself\.step\b", text) for text in stages.values()),
        shards=modules.has_shards,
        reduce=reduces,
        updates=modules.updates_buffers,
        loss_axes=loss_axes(model.program),
        loss_dtype=modules.graph.type_of(modules.graph.loss).dtype,
    )
    if modules.updates_buffers:
        yield step_functions.UPDATE_BUFFERS
    if modules.has_shards:
        yield zero1_functions.groups(list(modules.blocks.values()), several_dtypes=len(dtypes) > 1)
        yield zero1_functions.exchange(modules.parameter_axes, over=mesh.state_axis)
    if reduces:
        whole = [axis for axis in modules.reduced_axes if modules.is_all_partial(axis)]
        yield step_functions.reduce_gradients(
            whole,
            [axis for axis in modules.reduced_axes if axis not in whole],
            tied=modules.tie_ranks if modules.has_ties else (),
            several=modules.has_several_stages,
            shards=mesh.state_axis if modules.has_shards else "",
            distributed=bool(modules.parameter_axes) or modules.has_fsdp,
            several_dtypes=any(modules.num_dtypes(axis) > 1 for axis in modules.reduced_axes),
            is_empty_somewhere=any(
                not any(is_partial(tensor.partial, axis) for tensor in stage.tensors)
                for axis in modules.reduced_axes
                for stage in model.stages
            ),
        )
    if modules.has_dtensors:
        yield step_functions.LOCAL_GRADIENT
    yield step_functions.clip_gradients(
        distributed=modules.has_dtensors,
        shards=modules.has_shards,
        copies=_copies(modules),
        world=mesh.world_size,
        several=modules.has_several_stages,
        dtypes=dtypes,
    )


def _copies(modules: Modules) -> str:
    """How many ranks hold the same part of parameter p's gradient, as source; empty where always one."""
    held = [t for stage in modules.model.stages for t in stage.tensors if not t.is_buffer]
    parts = ["DP"] if modules.mesh.dp > 1 and "dp" in reduced_axes(modules.options.zero) else []
    parts += ["REPLICAS"] if modules.mesh.replicas > 1 else []
    if modules.has_shards and any(not _is_cut(tensor) for tensor in held):
        parts = [f"({modules.mesh.state_axis.upper()} if p.placements[0].is_replicate() else 1)"]
    axes = modules.parameter_axes
    for axis in reduced_axes(modules.options.zero):
        if axis == "dp":
            continue
        whole = [tensor.shard_dim(axis) is None for tensor in held]
        if modules.mesh.sizes[axis] > 1 and any(whole):
            size = axis.upper()
            position = axes.index(axis) - len(axes) if axis in axes else 0
            parts.append(size if all(whole) else f"({size} if p.placements[{position}].is_replicate() else 1)")
    if modules.has_ties:
        parts.append("len(TIED.get(name, (0,)))")
    return " * ".join(parts)


def _is_cut(tensor: HeldTensor) -> bool:
    """Whether ZeRO-1 has a dim to split a parameter along."""
    taken = {tensor.shard_dim(axis) for axis, _ in tensor.splits}
    return any(dim not in taken for dim in range(len(tensor.shape)))


def _pipeline(modules: Modules) -> str:
    """The function that wraps a stage for torch's schedule, with the shapes that cross its edges."""
    stages = modules.model.stages
    last = len(stages) - 1
    return pipeline_functions.pipeline(
        [_shapes(modules, stage.received) for stage in stages],
        [_shapes(modules, stage.sent if stage.index < last else (modules.graph.loss,)) for stage in stages],
        schedule=modules.options.schedule,
        has_parameters=all(any(not tensor.is_buffer for tensor in stage.tensors) for stage in stages),
        shares=bool(modules.mesh.shares),
        gathers=modules.has_fsdp and modules.options.zero == FREED and modules.splits_backward,
    )


def _shapes(modules: Modules, values: Sequence[Value]) -> str:
    parts: list[str] = []
    for value in values:
        local = local_output(modules.program, value)
        arguments = [*map(str, local.shape)]
        arguments += [] if local.dtype == DEFAULT_DTYPE else [f"dtype=torch.{local.dtype}"]
        arguments += [] if local.requires_grad else ["requires_grad=False"]
        parts.append(f"tensor({', '.join(arguments)})")
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
