"""The functions at the end of sharded_model.py: fixed text, put together from the lines that a plan needs."""

from __future__ import annotations

from collections.abc import Sequence

from ....planner.sharding.mesh import Mesh
from ...source import layout, literal

LOCAL = '''\
def local(p: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter. Where its gradient is a partial sum, `reduce_gradients` completes it."""
    return p.to_local()'''

_WEIGHTS = '''\
class Weights(nn.Module):
    """Parameters, buffers and modules under the user's names."""

    def __init__(self, **members: torch.Tensor | nn.Module):
        super().__init__()
        for name, member in members.items():
            setattr(self, name, member)'''
_WEIGHTS_BY_NAME = """

    def __getitem__(self, name: str) -> torch.Tensor | nn.Module:
        return getattr(self, name)

    def __setitem__(self, name: str, member: torch.Tensor | nn.Module) -> None:
        setattr(self, name, member)"""


def weights(*, by_name: bool) -> str:
    return _WEIGHTS + (_WEIGHTS_BY_NAME if by_name else "")


_PARAMETER_TP = '''\
def parameter(
    mesh: DeviceMesh,
    placement: Shard | Replicate,
    *shape: int,
    dtype: torch.dtype | None = None,
    requires_grad: bool = True,
) -> nn.Parameter:
    """A parameter of this global shape, placed on the tp axis and not yet filled."""
    sizes = list(shape)
    if isinstance(placement, Shard):
        sizes[placement.dim] //= TP
    part = DTensor.from_local(torch.empty(sizes, dtype=dtype), mesh["tp"], [placement], run_check=False)
    return nn.Parameter(part, requires_grad)'''

_PARAMETER = '''\
def parameter(*shape: int, dtype: torch.dtype | None = None, requires_grad: bool = True) -> nn.Parameter:
    """A parameter that is not yet filled."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad)'''


def parameter(*, tp: bool) -> str:
    return _PARAMETER_TP if tp else _PARAMETER


RECOMPUTED = '''\
def recomputed(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Checkpoint a block that updates running statistics: running it again in the backward leaves them alone."""
    contexts = nullcontext(), spare_buffers(block)
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts)


@contextmanager
def spare_buffers(block: nn.Module) -> Iterator[None]:
    """Let the block work on copies of its buffers."""
    buffers = [(m, name, buffer) for m in block.modules() for name, buffer in m.named_buffers(recurse=False)]
    for module, name, buffer in buffers:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)'''


def build_mesh(mesh: Mesh) -> str:
    axes = {name: size for name, size in mesh.sizes.items() if size > 1} or {"dp": 1}
    shape = ", ".join(name.upper() for name in axes) + ("," if len(axes) == 1 else "")
    return f'''\
def build_mesh(device_type: str) -> DeviceMesh:
    """The ranks of the plan, neighbours on the last axis. `device_type` is "cuda" or "cpu"."""
    return init_device_mesh(device_type, ({shape}), mesh_dim_names={literal(tuple(axes))})'''


def build_stage(*, stages: Sequence[str], fsdp: bool, blocks: Sequence[str], tied: bool) -> str:
    if len(stages) == 1:
        make = f"{stages[0]}(mesh)"
    else:
        make = f'({", ".join(stages)})[mesh["pp"].get_local_rank()](mesh)'
    part = "stage" if len(stages) > 1 else "part of the model"
    lines = [
        'def build_stage(mesh: DeviceMesh, device: torch.device | str = "meta") -> nn.Module:',
        f'    """This rank\'s {part}, on `device` and not yet filled."""',
        "    with torch.device(device):",
        *layout(f"stage = {make}", "        "),
    ]
    if fsdp:
        lines.append("    # Gradients are sums, not means: the loss is already divided by the global count.")
        if blocks:
            kinds = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
            lines.append("    for module in stage.modules():")
            lines += layout(f"if isinstance(module, {kinds}):", "        ")
            lines.append('            fully_shard(module, mesh=mesh["dp"], reshard_after_forward=ZERO == 3)')
        lines += [
            '    fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=ZERO == 3)',
            "    for module in stage.modules():",
            "        if isinstance(module, FSDPModule):",
            "            module.set_gradient_divide_factor(1.0)",
            "            # A plain sum: gloo has no other reduction in float32, and none is needed.",
            "            module.set_force_sum_reduction_for_comms(True)",
        ]
    if tied:
        lines.append("    stage.tied_groups = tied_groups(mesh)")
    lines.append("    return stage")
    text = "\n".join(lines)
    return f"{text}\n\n\n{_TIED_GROUPS}" if tied else text


_TIED_GROUPS = '''\
def tied_groups(mesh: DeviceMesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group among the holders of tied parameters, by the stages that hold them."""
    groups = {}
    for stages in sorted(set(TIED.values())):
        for ranks in mesh.mesh[list(stages)].reshape(len(stages), -1).T.tolist():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[stages] = group
    return groups'''


def state_dicts(*, distributed: bool, fused: bool) -> str:
    put = ["            value = full[name].reshape(tensor.shape).to(tensor.device, tensor.dtype)"]
    if distributed:
        put += [
            "            if isinstance(tensor, DTensor):",
            "                places = tensor.placements",
            "                value = distribute_tensor(value, tensor.device_mesh, places, src_data_rank=None)",
        ]
    put += ["            tensor.copy_(value)"]
    get = ["        value = tensor.detach()"]
    if distributed:
        get += [
            "        if isinstance(value, DTensor):",
            "            value = value.full_tensor()",
        ]
    if fused:
        get += [
            "        if name in fused:",
            "            value = value.flatten(fused[name], fused[name] + 1)",
        ]
    get += ["        full[name] = value"]
    lines = [
        "def load_full_state_dict(stage: nn.Module, full: dict[str, torch.Tensor]) -> None:",
        '    """Fill this rank\'s part from all parameters and buffers, in the user\'s names and shapes."""',
        "    if any(p.is_meta for p in stage.parameters()):",
        '        stage.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")',
        "    with torch.no_grad():",
        "        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:",
        *put,
        "",
        "",
        "def full_state_dict(stage: nn.Module) -> dict[str, torch.Tensor]:",
        '    """Parameters and buffers of this stage, whole on every rank, by the user\'s names and shapes."""',
    ]
    if fused:
        lines += [
            "    fused = {",
            '        f"{prefix}.{name}".lstrip("."): dim',
            "        for prefix, module in stage.named_modules()",
            '        for name, dim in getattr(module, "fused", {}).items()',
            "    }",
        ]
    lines += [
        "    full = {}",
        "    for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:",
        *get,
        "    return full",
    ]
    return "\n".join(lines)


def split_microbatches(*, groups: bool) -> str:
    if not groups:
        return '''\
def split_microbatches(
    values: dict[str, torch.Tensor], batch_dims: dict[str, int]
) -> list[dict[str, torch.Tensor]]:
    """The values of each microbatch."""
    parts = {name: values[name].chunk(MICROBATCHES, dim) for name, dim in batch_dims.items()}
    return [values | {name: part[index] for name, part in parts.items()} for index in range(MICROBATCHES)]'''.replace(
            "def split_microbatches(\n    values: dict[str, torch.Tensor], batch_dims: dict[str, int]\n) ->",
            "def split_microbatches(values: dict[str, torch.Tensor], batch_dims: dict[str, int]) ->",
        )
    return '''\
def split_microbatches(
    values: dict[str, torch.Tensor], batch_dims: dict[str, tuple[int, int]]
) -> list[dict[str, torch.Tensor]]:
    """The values of each microbatch; a dim of several runs is cut within each run."""
    parts = {}
    for name, (dim, runs) in batch_dims.items():
        cut = values[name].unflatten(dim, (runs, MICROBATCHES, -1)).unbind(dim + 1)
        parts[name] = [part.flatten(dim, dim + 1) for part in cut]
    return [values | {name: part[index] for name, part in parts.items()} for index in range(MICROBATCHES)]'''


def pipeline(received: Sequence[str], sent: Sequence[str], *, schedule: str) -> str:
    name = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}[schedule]
    edges: list[str] = []
    for index, (before, after) in enumerate(zip(received, sent, strict=True)):
        edges += layout(f"({before}, {after}),  # stage {index}", "        ")
    return (
        f'''\
def pipeline(stage: nn.Module, mesh: DeviceMesh) -> {name}:
    """The stage in its schedule. One microbatch's tensors cross the edges between stages with these shapes."""
    dtype = next((p.dtype for p in stage.parameters()), None)

    def tensor(*shape: int, dtype: torch.dtype | None = dtype, requires_grad: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

    edges = (
'''
        + "\n".join(edges)
        + f"""
    )
    index = mesh["pp"].get_local_rank()
    device = next((p.device for p in stage.parameters()), torch.device(mesh.device_type))
    received, sent = edges[index]
    wrapped = PipelineStage(
        stage, index, PP, device, input_args=received, output_args=sent, group=mesh["pp"].get_group()
    )
    # The last stage returns the loss itself; it is a sum over microbatches, so gradients are not rescaled.
    return {name}(wrapped, MICROBATCHES, loss_fn=lambda loss, _: loss, scale_grads=False)"""
    )


def train_step(
    *,
    pp: int,
    microbatches: int,
    fsdp: bool,
    random: bool,
    reduce: bool,
    updates: bool,
    loss_condition: str,
    world: int,
) -> str:
    lines = [
        "def train_step(stage: nn.Module, mesh: DeviceMesh, inputs: dict[str, torch.Tensor], step: int)"
        " -> torch.Tensor:",
        '    """Forward and backward of one step; gradients are left in `.grad`. Returns the loss of the whole batch.',
        "",
        "    `inputs` is the share of this rank's dp coordinate, by argument name.",
        '    """',
        "    stage.zero_grad()",
        "    values = stage.prepare(inputs)",
    ]
    if random:
        lines.append("    stage.step = step  # random operations draw from (step, microbatch, operation, coordinates)")
    prepared = "split_microbatches(values, stage.batch_dims)" if microbatches > 1 else "[values]"
    lines.append(f"    stage.microbatches = {prepared}")
    lines += _run_pipeline() if pp > 1 else _run_loop(microbatches, fsdp)
    if reduce:
        lines.append("    reduce_gradients(stage, mesh)")
    if updates:
        lines += ["    if stage.training:", "        update_buffers(stage)"]
    if loss_condition:
        lines += [
            "    # Ranks that hold the same part of the loss as another count zero.",
            f"    if not ({loss_condition}):" if " and " in loss_condition else f"    if {_negated(loss_condition)}:",
            "        loss = torch.zeros_like(loss)",
        ]
    if world > 1:
        lines.append("    dist.all_reduce(loss)")
    lines.append("    return loss")
    return "\n".join(lines)


UPDATE_BUFFERS = '''\
def update_buffers(stage: nn.Module) -> None:
    """Give buffers that count or average over steps the values that the forward pass left for them."""
    for module in stage.modules():
        for name, value in getattr(module, "updated", {}).items():
            module.get_buffer(name).copy_(value)'''


def _negated(condition: str) -> str:
    return condition.replace("==", "!=")


def _run_pipeline() -> list[str]:
    return [
        '    if not hasattr(stage, "schedule"):',
        "        stage.schedule = pipeline(stage, mesh)",
        "    losses = []",
        "    numbers = torch.arange(MICROBATCHES)",
        '    is_last = mesh["pp"].get_local_rank() == PP - 1',
        "    stage.schedule.step(",
        "        microbatch=numbers,",
        "        target=numbers if is_last else None,",
        "        losses=losses if is_last else None,",
        "        return_outputs=False,",
        "    )",
        "    device = next((value.device for value in inputs.values()), None)",
        "    loss = torch.stack(losses).sum().detach() if is_last else torch.zeros((), device=device)",
    ]


def _run_loop(microbatches: int, fsdp: bool) -> list[str]:
    if microbatches == 1:
        return ["    loss = stage(microbatch=0)", "    loss.backward()", "    loss = loss.detach()"]
    lines = ["    losses = []", "    for microbatch in range(MICROBATCHES):"]
    if fsdp:
        lines += [
            "        # Gradients stay whole on each rank until the last microbatch, then they are summed and sharded.",
            "        is_last = microbatch == MICROBATCHES - 1",
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


def reduce_gradients(axes: Sequence[str], *, tied: bool, distributed: bool) -> str:
    lines = [
        "def reduce_gradients(stage: nn.Module, mesh: DeviceMesh) -> None:",
        '    """Complete the gradients that are partial sums: one all_reduce per axis'
        + (', then one per tied parameter."""' if tied else '."""'),
    ]
    if axes:
        lines += [
            f"    for axis in {literal(tuple(axes))}:",
            "        partial = [",
            "            module.get_parameter(name) for module in stage.modules() "
            'for name in getattr(module, f"partial_{axis}", ())',
            "        ]",
            "        gradients = [local_gradient(p) for p in partial if p.grad is not None]",
            "        for dtype in sorted({g.dtype for g in gradients}, key=str):",
            "            same = [g for g in gradients if g.dtype == dtype]",
            "            bucket = torch.cat([g.flatten() for g in same])",
            "            dist.all_reduce(bucket, group=mesh[axis].get_group())",
            "            for g, total in zip(same, bucket.split([g.numel() for g in same]), strict=True):",
            "                g.copy_(total.view_as(g))",
        ]
    if tied:
        lines += [
            '    index = mesh["pp"].get_local_rank()',
            "    for name, stages in TIED.items():",
            "        if index in stages:",
            "            gradient = local_gradient(stage.get_parameter(name))",
            "            dist.all_reduce(gradient, group=stage.tied_groups[stages])",
        ]
    return "\n".join(lines)


def local_gradient(*, distributed: bool) -> str:
    text = '''\
def local_gradient(p: nn.Parameter) -> torch.Tensor:
    """This rank's part of a gradient."""
'''
    return text + (
        "    return p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad"
        if distributed
        else "    return p.grad"
    )


def clip_gradients(*, distributed: bool, replicated_dp: bool, tied: bool, world: int) -> str:
    counted = _is_counted(distributed=distributed, replicated_dp=replicated_dp, tied=tied)
    condition = "p.grad is not None and is_counted(name, p, mesh)" if counted else "p.grad is not None"
    lines = [
        local_gradient(distributed=distributed),
        "",
        "",
        "def clip_gradients(stage: nn.Module, mesh: DeviceMesh, max_norm: float) -> torch.Tensor:",
        '    """Scale gradients so that their norm over the whole model is at most `max_norm`; returns the norm."""',
        "    gradients = [local_gradient(p) for p in stage.parameters() if p.grad is not None]",
        "    device = next((g.device for g in gradients), torch.device(mesh.device_type))",
        "    dtype = torch.promote_types(torch.float32, torch.get_default_dtype())",
        "    total = torch.zeros((), dtype=dtype, device=device)",
        "    for name, p in stage.named_parameters():" if counted else "    for p in stage.parameters():",
        f"        if {condition}:",
        "            total += local_gradient(p).to(dtype).square().sum()",
    ]
    if world > 1:
        lines.append("    dist.all_reduce(total)")
    lines += [
        "    norm = total.sqrt()",
        "    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)",
        "    for g in gradients:",
        "        g.mul_(scale)",
        "    return norm",
    ]
    return "\n".join([*lines, *(["", "", *counted] if counted else [])])


def _is_counted(*, distributed: bool, replicated_dp: bool, tied: bool) -> list[str]:
    """Empty where every rank counts all that it holds."""
    refusals: list[str] = []
    if tied:
        refusals.append('name in TIED and mesh["pp"].get_local_rank() != TIED[name][0]')
    if replicated_dp:
        refusals.append('mesh["dp"].get_local_rank() != 0')
    if not refusals and not distributed:
        return []
    lines = [
        "def is_counted(name: str, p: nn.Parameter, mesh: DeviceMesh) -> bool:",
        '    """Whether this rank adds its part of a gradient to the norm: of equal parts one rank\'s counts."""',
    ]
    if not distributed:
        return [*lines, f"    return not ({' or '.join(f'({r})' if ' and ' in r else r for r in refusals)})"]
    for refusal in refusals:
        lines += [f"    if {refusal}:", "        return False"]
    return [
        *lines,
        "    if not isinstance(p, DTensor):",
        "        return True",
        "    places = zip(p.placements, p.device_mesh.get_coordinate(), strict=True)",
        "    return all(coordinate == 0 or not placement.is_replicate() for placement, coordinate in places)",
    ]


__all__ = [
    "LOCAL", "RECOMPUTED", "UPDATE_BUFFERS", "build_mesh", "build_stage", "clip_gradients", "local_gradient",
    "parameter", "pipeline", "reduce_gradients", "split_microbatches", "state_dicts", "train_step", "weights",
]  # fmt: skip
