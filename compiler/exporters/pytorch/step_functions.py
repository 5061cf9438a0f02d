"""Functions of sharded_model.py that run a step: fixed text, put together from the lines that a plan needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from ...text import LINE_WIDTH, layout
from .meshes import states_of
from .tensors import DEFAULT_DTYPE

NUM_MICROBATCHES = '''\
def num_microbatches(mesh: DeviceMesh) -> int:
    """How many microbatches this rank's dp coordinate takes in a step."""
    return BATCH_SHARES[mesh["dp"].get_local_rank()]'''
_SPLIT = """\
    parts = {name: values[name].chunk(COUNT, dim) for name, dim in batch_dims.items()}
    return [values | {name: part[index] for name, part in parts.items()} for index in range(COUNT)]"""
_SPLIT_RUNS = """\
    parts = {}
    for name, (dim, runs) in batch_dims.items():
        cut = values[name].unflatten(dim, (runs, COUNT, -1)).unbind(dim + 1)
        parts[name] = [part.flatten(dim, dim + 1) for part in cut]
    return [values | {name: part[index] for name, part in parts.items()} for index in range(COUNT)]"""


def split_microbatches(*, groups: bool, shares: bool) -> str:
    """`groups`: some values are cut within several runs of a dim. `shares`: dp ranks take different numbers."""
    dims = "tuple[int, int]" if groups else "int"
    count = ", count: int" if shares else ""
    arguments = f"values: dict[str, torch.Tensor], batch_dims: dict[str, {dims}]{count}"
    opening, closing = "def split_microbatches(", ") -> list[dict[str, torch.Tensor]]:"
    is_long = len(f"{opening}{arguments}{closing}") > LINE_WIDTH
    more = "; a dim of several runs is cut within each run" if groups else ""
    lines = [
        *([opening, f"    {arguments}", closing] if is_long else [f"{opening}{arguments}{closing}"]),
        f'    """The values of each microbatch{more}."""',
        (_SPLIT_RUNS if groups else _SPLIT).replace("COUNT", "count" if shares else "MICROBATCHES"),
    ]
    return "\n".join(lines)


def train_step(
    *,
    pp: int,
    num_stages: int | None,
    microbatches: int,
    shares: bool,
    fsdp: bool,
    random: bool,
    shards: bool,
    reduce: bool,
    updates: bool,
    loss_axes: Sequence[str],
    loss_dtype: str,
) -> str:
    """`num_stages`: of the whole pipeline, where a rank's stages are a list. `loss_axes`: over which the ranks' parts
    of the loss add up, pp included; "world" for all ranks at once. `shares`: dp ranks take different numbers of
    microbatches."""
    several = num_stages is not None
    model, kind, indent = ("stages", "nn.ModuleList", "        ") if several else ("stage", "nn.Module", "    ")
    lines = [
        *layout(
            f"def train_step({model}: {kind}, mesh: DeviceMesh, inputs: dict[str, torch.Tensor], step: int)"
            " -> torch.Tensor:",
            "",
        ),
        '    """Forward and backward of one step; gradients are left in `.grad`. Returns the loss of the whole batch.',
        "",
        "    `inputs` is the share of this rank's dp coordinate, by argument name.",
        '    """',
        *(["    count = num_microbatches(mesh)"] if shares else []),
        f"    {model}.zero_grad()",
        *([f"    gather_parameters({model}, mesh)"] if shards else []),
    ]
    if several:
        lines.append("    for stage in stages:")
    if random:
        note = "random operations draw from (step, microbatch, operation, coordinates)"
        lines.append(f"{indent}stage.step = step  # {note}")
    if microbatches > 1:
        more = ", count" if shares else ""
        lines.append(f"{indent}stage.microbatches = split_microbatches(stage.prepare(inputs), stage.batch_dims{more})")
    else:
        lines.append(f"{indent}stage.microbatches = [stage.prepare(inputs)]")
    count = "count" if shares else "MICROBATCHES"
    lines += _run_pipeline(loss_dtype, num_stages, count) if pp > 1 else _run_loop(microbatches, fsdp, count)
    if reduce:
        lines.append(f"    reduce_gradients({model}, mesh)")
    if updates:
        lines += [f"    if {model}.training:", f"        update_buffers({model})"]
    if "world" in loss_axes:
        lines.append("    dist.all_reduce(loss)  # every rank has its part of it")
    else:
        notes = {"dp": "each has the part of its samples", "pp": "from the last stage to all"}
        lines += [
            f'    dist.all_reduce(loss, group=mesh["{a}"].get_group())  # {notes.get(a, "each has a part")}'
            for a in loss_axes
        ]
    return "\n".join([*lines, "    return loss"])


UPDATE_BUFFERS = '''\
def update_buffers(stage: nn.Module) -> None:
    """Give buffers that count or average over steps the values that the forward pass left for them."""
    for module in stage.modules():
        for name, value in getattr(module, "updated", {}).items():
            module.get_buffer(name).copy_(value)'''


def _run_pipeline(loss_dtype: str, num_stages: int | None, count: str) -> list[str]:
    dtype = "" if loss_dtype == DEFAULT_DTYPE else f"dtype=torch.{loss_dtype}, "
    model, is_last = "stage", 'mesh["pp"].get_local_rank() == PP - 1'
    if num_stages is not None:
        model, is_last = "stages", f'{num_stages - 1} in RANK_STAGES[mesh["pp"].get_local_rank()]'
    return [
        f'    if not hasattr({model}, "schedule"):',
        f"        {model}.schedule = pipeline({model}, mesh)",
        f"    numbers = torch.arange({count})",
        f"    if {is_last}:" + ("  # the last stage" if num_stages is not None else ""),
        "        losses = []",
        f"        {model}.schedule.step(microbatch=numbers, target=numbers, losses=losses, return_outputs=False)",
        "        loss = torch.stack(losses).sum().detach()",
        "    else:",
        f"        {model}.schedule.step(microbatch=numbers, return_outputs=False)",
        f"        loss = torch.zeros((), {dtype}device=mesh.device_type)",
    ]


def _run_loop(microbatches: int, fsdp: bool, count: str) -> list[str]:
    if microbatches == 1:
        return ["    loss = stage(microbatch=0)", "    loss.backward()", "    loss = loss.detach()"]
    lines = ["    losses = []", f"    for microbatch in range({count}):"]
    if fsdp:
        lines += [
            "        # Gradients stay whole on each rank until the last microbatch, then they are summed and sharded.",
            f"        is_last = microbatch == {count} - 1",
            "        stage.set_is_last_backward(is_last)",
            "        stage.set_reshard_after_backward(is_last)",
            "        stage.set_requires_gradient_sync(is_last)",
        ]
    return [
        *lines,
        "        loss = stage(microbatch=microbatch)",
        "        loss.backward()",
        "        losses.append(loss.detach())",
        "    loss = torch.stack(losses).sum()",
    ]


BUCKET = '''\
def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up gradients over a group, in one all_reduce."""
    gradients = [GRADIENT for p in parameters if p.grad is not None]
    bucket = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(bucket, group=group)
    for g, total in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        g.copy_(total.view_as(g))'''
BUCKETS = '''\
def all_reduce_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add up gradients over a group, in one all_reduce for each dtype."""
    gradients = [GRADIENT for p in parameters if p.grad is not None]
    for dtype in sorted({g.dtype for g in gradients}, key=str):
        same = [g for g in gradients if g.dtype == dtype]
        bucket = torch.cat([g.flatten() for g in same])
        dist.all_reduce(bucket, group=group)
        for g, total in zip(same, bucket.split([g.numel() for g in same]), strict=True):
            g.copy_(total.view_as(g))'''
LOCAL_GRADIENT = '''\
def local_gradient(p: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient."""
    return p.grad.to_local()'''


def _holder(shards: bool, model: str = "stage") -> str:
    """The module whose parameters have the gradients of a step in the end."""
    return f"optimized({model})" if shards else model


def _gradient(distributed: bool) -> str:
    return "local_gradient(p)" if distributed else "p.grad"


def reduce_gradients(
    whole: Sequence[str],
    listed: Sequence[str],
    *,
    tied: Sequence[int],
    several: bool,
    shards: str,
    distributed: bool,
    several_dtypes: bool,
    is_empty_somewhere: bool,
) -> str:
    """`whole`: axes (or "dp_cp") on which every gradient is a partial sum; `listed`: those where modules name the
    parameters.

    `tied`: on how many ranks each tied parameter is held. `shards`: over which axis the optimizer has parts, if any.
    `several`: a rank's stages are a list.
    `is_empty_somewhere`: some stage has no partial sum on one of the axes.
    """
    model, kind = ("stages", "nn.ModuleList") if several else ("stage", "nn.Module")
    lines = [f"def reduce_gradients({model}: {kind}, mesh: DeviceMesh) -> None:"]
    steps = [f"all over {axis.replace('_', ' and ')}" for axis in whole]
    steps += [f"`partial_{axis}` over {axis}" for axis in listed]
    steps += [f"all over {shards} into parts"] if shards else []
    steps += ["tied parameters over their holders"] if tied else []
    lines.append(f'    """Complete gradients that are partial sums: {", then ".join(steps)}."""')
    lines += [f"    all_reduce_gradients({model}.parameters(), {states_of(axis)}.get_group())" for axis in whole]
    for axis in listed:
        named = f'getattr(module, "partial_{axis}", ())'
        found = f"[module.get_parameter(name) for module in {model}.modules() for name in {named}]"
        lines += layout(f"partial = {found}", "    ")
        lines.append(f'    all_reduce_gradients(partial, mesh["{axis}"].get_group())')
    lines += [f"    scatter_gradients({model}, mesh)"] if shards else []
    if tied and several:
        lines += _tied_of_several(tied, shards=bool(shards), distributed=distributed)
    elif tied:
        gradient = f"{_holder(bool(shards))}.get_parameter(name)"
        gradient = f"local_gradient({gradient})" if distributed or shards else f"{gradient}.grad"
        lines += [
            "    for name, stages in TIED.items():",
            '        if mesh["pp"].get_local_rank() in stages:',
            f"            dist.all_reduce({gradient}, group=stage.tied_groups[stages])",
        ]
    text = "\n".join(lines)
    if not whole and not listed:
        return text
    bucket = BUCKETS if several_dtypes else BUCKET
    if is_empty_somewhere and not several_dtypes:
        bucket = bucket.replace("    bucket =", "    if not gradients:\n        return\n    bucket =")
    return text + "\n\n\n" + bucket.replace("GRADIENT", _gradient(distributed))


def _tied_of_several(tied: Sequence[int], *, shards: bool, distributed: bool) -> list[str]:
    parameter = f"{'optimized(here[index])' if shards else 'here[index]'}.get_parameter(name)"
    gradient = f"local_gradient({parameter})" if distributed or shards else f"{parameter}.grad"
    lines = [
        '    here = dict(zip(RANK_STAGES[mesh["pp"].get_local_rank()], stages, strict=True))',
        "    for name, holders in TIED.items():",
        f"        gradients = [{gradient} for index in holders if index in here]",
        "        for g in gradients[1:]:",
        "            gradients[0].add_(g)",
    ]
    if max(tied) > 1:
        is_here = "gradients" if min(tied) > 1 else "holders in stages.tied_groups"
        lines += [
            f"        if {is_here}:",
            "            dist.all_reduce(gradients[0], group=stages.tied_groups[holders])",
        ]
    return [*lines, "        for g in gradients[1:]:", "            g.copy_(gradients[0])"]


def clip_gradients(
    *, distributed: bool, shards: bool, copies: str, world: int, several: bool, dtypes: Collection[str]
) -> str:
    """`several`: a rank's stages are a list. `copies`: source of the number of ranks that hold the same part of p's
    gradient; empty where it is one. `dtypes` of the parameters."""
    model, kind = ("stages", "nn.ModuleList") if several else ("stage", "nn.Module")
    gradient, holder = _gradient(distributed), _holder(shards, model)
    widest = "dtype=torch.float64, " if {"float64", "complex128"} & set(dtypes) else ""
    every = f"{holder}.parameters():"
    if "name" in copies:
        named = f"{_holder(shards)}.named_parameters()"
        every = f"(item for stage in stages for item in {named}):" if several else f"{named}:"
    lines = [
        f"def clip_gradients({model}: {kind}, mesh: DeviceMesh, max_norm: float) -> torch.Tensor:",
        '    """Scale gradients so that their norm over the whole model is at most `max_norm`; returns the norm."""',
        f"    total = torch.zeros((), {widest}device=mesh.device_type)",
        f"    for {'name, p' if 'name' in copies else 'p'} in {every}",
        "        if p.grad is not None:",
    ]
    divisor = f"({copies})" if "*" in copies else copies
    size = f"{gradient}.abs()" if any(dtype.startswith("complex") for dtype in dtypes) else gradient
    square = f"torch.linalg.vector_norm({size}, dtype=total.dtype) ** 2"
    is_constant = bool(re.fullmatch(r"[A-Z]+( \* [A-Z]+)*", copies))
    if copies and not is_constant:
        lines += [
            "            # Ranks that hold the same part count a share of it each.",
            *_product("copies", copies),
            f"            total += {square} / copies",
        ]
    else:
        lines.append(f"            total += {square}")
    lines += ["    dist.all_reduce(total)"] if world > 1 else []
    lines += [
        f"    norm = (total / {divisor}).sqrt()  # each part was counted by all its holders"
        if is_constant
        else "    norm = total.sqrt()",
        "    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        f"    for p in {holder}.parameters():",
        "        if p.grad is not None:",
        f"            {gradient}.mul_(scale)",
        "    return norm",
    ]
    return "\n".join(lines)


def _product(name: str, factors: str) -> Sequence[str]:
    """`name = factors`, a factor a line where one line is too short."""
    line = f"            {name} = {factors}"
    if len(line) <= LINE_WIDTH and " * " in factors:
        return [line]
    first, *others = (f[1:-1] if f.startswith("(") else f for f in factors.split(" * "))
    return [f"            {name} = {first}", *(f"            {name} *= {other}" for other in others)]


__all__ = [
    "LOCAL_GRADIENT", "UPDATE_BUFFERS", "clip_gradients", "reduce_gradients", "split_microbatches",
    "train_step",
]  # fmt: skip
