"""Functions of sharded_model.py that build and fill a stage: fixed text, put together from the lines a plan needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from ...text import layout, quote
from .meshes import replicated, states_of


def local(*, partial: bool) -> str:
    more = " Where its gradient is a partial sum, `reduce_gradients` completes it." if partial else ""
    return f'''\
def local(p: nn.Parameter) -> torch.Tensor:
    """This rank's part of a parameter.{more}"""
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


def weights(*, by_name: bool, has_self: bool) -> str:
    """`by_name`: members are indexed by name; `has_self`: one of them is called self."""
    text = _WEIGHTS + (_WEIGHTS_BY_NAME if by_name else "")
    return text.replace("__init__(self, **members", "__init__(self, /, **members") if has_self else text


def parameter(*, axes: Sequence[str], dtype: bool, frozen: bool) -> str:
    """`axes`: those on which parameters are DTensors; `dtype`, `frozen`: whether some parameter has another dtype than
    the default, or is not trained."""
    arguments = ["*shape: int"]
    arguments += ["dtype: torch.dtype | None = None"] if dtype else []
    arguments += ["requires_grad: bool = True"] if frozen else []
    given, trained = ", dtype=dtype" if dtype else "", ", requires_grad" if frozen else ""
    if not axes:
        return "\n".join(
            (
                f"def parameter({', '.join(arguments)}) -> nn.Parameter:",
                '    """A parameter that is not yet filled."""',
                f"    return nn.Parameter(torch.empty(shape{given}){trained})",
            )
        )
    if len(axes) == 1:
        (axis,) = axes
        placement, where, placements = "placement: Shard | Replicate", f"the {axis} axis", "[placement]"
        sizes = ["    if isinstance(placement, Shard):", f"        sizes[placement.dim] //= {axis.upper()}"]
    else:
        placement, where = "placements: tuple[Shard | Replicate, ...]", f"the axes {' and '.join(axes)}"
        placements = "placements"
        sizes = [
            f"    for placement, size in zip(placements, ({', '.join(map(str.upper, axes))}), strict=True):",
            "        if isinstance(placement, Shard):",
            "            sizes[placement.dim] //= size",
        ]
    signature = f"def parameter({', '.join(('mesh: DeviceMesh', placement, *arguments))})"
    on = f"mesh[{', '.join(map(quote, axes))}]"
    return "\n".join(
        (
            *layout(f"{signature} -> nn.Parameter:", ""),
            f'    """A parameter of this global shape, placed on {where} and not yet filled."""',
            "    sizes = list(shape)",
            *sizes,
            f"    part = DTensor.from_local(torch.empty(sizes{given}), {on}, {placements}, run_check=False)",
            f"    return nn.Parameter(part{trained})",
        )
    )


_RECOMPUTED = '''\
def recomputed(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    """Checkpoint a block that updates running statistics: running it again in the backward leaves them alone."""
CONTEXTS
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
_NOTHING_KEPT = "    contexts = nullcontext(), spare_buffers(block)"
_RESULTS_KEPT = """\
    first, again = keep_results()
    contexts = first, both(spare_buffers(block), again)"""
_EITHER_KEPT = """\
    first, again = keep_results() if keeps_results else (nullcontext(), nullcontext())
    contexts = first, both(spare_buffers(block), again)"""
_BOTH = """


@contextmanager
def both(one: AbstractContextManager, other: AbstractContextManager) -> Iterator[None]:
    with one, other:
        yield"""

KEEP_RESULTS = '''\
def keep_results() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Selective checkpointing of a block: the backward computes it again, but for the results of KEPT."""
    return create_selective_checkpoint_contexts(KEPT)'''


def recomputed(policies: Sequence[str], *, splits_backward: bool) -> str:
    """The function that runs blocks which update running statistics, for these policies of theirs."""
    template = _RECOMPUTED
    if splits_backward:
        given = "use_reentrant=False, preserve_rng_state=False, "
        template = template.replace("checkpoint(", "recomputed_once(").replace(given, "")
    if len(policies) > 1:
        text = template.replace("CONTEXTS", _EITHER_KEPT)
        return text.replace("*inputs: torch.Tensor)", "*inputs: torch.Tensor, keeps_results: bool)", 1) + _BOTH
    text = template.replace("CONTEXTS", _RESULTS_KEPT if "selective" in policies else _NOTHING_KEPT)
    return text + _BOTH if "selective" in policies else text


def run_block(calls: Mapping[str, str]) -> str:
    """The function that runs a block under its own policy. `calls`: policy -> call that runs it so."""
    return "\n".join(
        (
            "def run_block(block: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:",
            '    """Run a block, so that the backward computes it again where the plan says so."""',
            *(
                line
                for policy, call in calls.items()
                for line in (f"    if block.fqn in {policy.upper()}:", f"        return {call}")
            ),
            "    return block(*inputs)",
        )
    )


def build_stage(
    *,
    stages: Sequence[str],
    zero: int | None,
    over: str,
    replicas: int,
    blocks: Sequence[str],
    layers: bool,
    named: bool,
    keeps_some: bool,
    tied: bool,
    several: bool,
) -> str:
    """`stages`: the class of each; `zero`: the ZeRO stage if there is one, `over` an axis of the mesh; `layers`: stages
    are given their blocks; `named`: modules are told their names; `keeps_some`: ZERO_2 names some blocks; `tied`: there
    are groups of ranks that hold tied parameters; `several`: a rank's stages are a list."""
    text = _build_stages(stages, layers) if several else _build_one(stages, layers)
    if named:
        text += _named(several)
    if zero == 1:
        text += _sharded(several)
    elif zero is not None:
        text += _fully_sharded(
            blocks, over, reshard=zero == 3, keeps_some=keeps_some, replicas=replicas, several=several
        )
    built = "stages" if several else "stage"
    if tied:
        text.append(f"    {built}.tied_groups = tied_groups(mesh)")
    text.append(f"    return {built}")
    groups = _TIED_GROUPS_OF_SEVERAL if several else _TIED_GROUPS
    return "\n".join(text) + (f"\n\n\n{groups}" if tied else "")


def _build_stages(stages: Sequence[str], layers: bool) -> list[str]:
    return [
        'def build_stage(mesh: DeviceMesh, device: torch.device | str = "meta") -> nn.ModuleList:',
        '    """This rank\'s stages in the order of the model, on `device` and not yet filled."""',
        *layout(f"classes = ({_classes(stages)})", "    "),
        '    mine = RANK_STAGES[mesh["pp"].get_local_rank()]',
        "    with torch.device(device):",
        f"        stages = nn.ModuleList(classes[i](mesh{', STAGE_LAYERS[i]' if layers else ''}) for i in mine)",
    ]


def _build_one(stages: Sequence[str], layers: bool) -> list[str]:
    what = "stage" if len(stages) > 1 else "part of the model"
    return [
        'def build_stage(mesh: DeviceMesh, device: torch.device | str = "meta") -> nn.Module:',
        f'    """This rank\'s {what}, on `device` and not yet filled."""',
        *(['    index = mesh["pp"].get_local_rank()'] if len(stages) > 1 else []),
        "    with torch.device(device):",
        *layout(f"stage = {_made(stages, layers=layers)}", "        "),
    ]


def _made(stages: Sequence[str], *, layers: bool) -> str:
    if len(stages) == 1:
        return f"{stages[0]}(mesh)"
    return f"({_classes(stages)})[index](mesh{', STAGE_LAYERS[index]' if layers else ''})"


def _named(several: bool) -> list[str]:
    """Every module has its name, by which `run_block` finds its policy."""
    indent = "        " if several else "    "
    return [
        *(["    for stage in stages:"] if several else []),
        f"{indent}for name, module in stage.named_modules():",
        f"{indent}    module.fqn = name",
    ]


def _sharded(several: bool) -> list[str]:
    """ZeRO-1: the parts of the parameters that the optimizer has."""
    line, note = "stage.shards = [Shards(stage, mesh)]", "in a list: they are no parameters of the stage"
    return ["    for stage in stages:", f"        {line}  # {note}"] if several else [f"    {line}  # {note}"]


def _classes(stages: Sequence[str]) -> str:
    runs = [(name, len(list(run))) for name, run in groupby(stages)]
    return ", ".join(name if count == 1 else f"*[{name}] * {count}" for name, count in runs)


def _fully_sharded(
    blocks: Sequence[str], axis: str, *, reshard: bool, keeps_some: bool, replicas: int, several: bool
) -> list[str]:
    over = "groups" if replicas > 1 else states_of(axis)
    each = str(reshard)
    policy = "ZeRO-3: gathered for each pass, then freed" if reshard else "ZeRO-2: gathered once a step, then kept"
    lines = [f"    # {policy}."]
    modules = "module in stage.modules()"
    if keeps_some:
        lines = [f"    # {policy}, but for the blocks of ZERO_2: gathered once, then kept."]
        modules, each = "name, module in stage.named_modules()", "name not in ZERO_2"
    if replicas > 1:
        lines += [
            "    # Neighbours on dp hold all shards between them; groups of such neighbours add up their gradients.",
            f"    groups = {replicated(axis)}",
        ]
    indent = "    "
    if several:
        lines.append("    for stage in stages:")
        indent += "    "
    if blocks:
        kinds = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        lines.append(f"{indent}for {modules}:")
        lines += layout(f"if isinstance(module, {kinds}):", f"{indent}    ")
        lines.append(f"{indent}        fully_shard(module, mesh={over}, reshard_after_forward={each})")
    # What lies outside the blocks is needed again at once in the backward: by default the root is not resharded.
    whole = f"mesh={over}" + ("" if blocks and reshard else f", reshard_after_forward={reshard}")
    return [
        *lines,
        f"{indent}fully_shard(stage, {whole})",
        f"    for module in {'stages' if several else 'stage'}.modules():",
        "        if isinstance(module, FSDPModule):",
        "            # Gradients are plain sums: the loss is already divided by the global count.",
        "            module.set_gradient_divide_factor(1.0)",
        "            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction in float32",
    ]


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


_TIED_GROUPS_OF_SEVERAL = '''\
def tied_groups(mesh: DeviceMesh) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """This rank's group among the holders of tied parameters, by the stages that hold them."""
    groups = {}
    for stages in sorted(set(TIED.values())):
        holders = [rank for rank, held in enumerate(RANK_STAGES) if not set(held).isdisjoint(stages)]
        for ranks in mesh.mesh[holders].reshape(len(holders), -1).T.tolist() if len(holders) > 1 else ():
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[stages] = group
    return groups'''


_USER_SHAPES = '''\
def user_shapes(stage: nn.Module) -> dict[str, tuple[int, ...]]:
    """The user's shapes of what is held in another one."""
    return {
        f"{prefix}.{name}".lstrip("."): shape
        for prefix, module in stage.named_modules()
        for name, shape in getattr(module, "user_shapes", {}).items()
    }'''


def state_dicts(*, distributed: bool, shards: bool, reshaped: bool) -> str:
    """`shards`: parameters are read from and written to the parts that the optimizer has. `reshaped`: some are held in
    another shape than the user's."""
    holder = "optimized(stage)" if shards else "stage"
    every = f"[*{holder}.named_parameters(), *{holder}.named_buffers()]"
    put = [f"            value = full[name]{'.reshape(tensor.shape)' * reshaped}.to(tensor.device, tensor.dtype)"]
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
    if reshaped:
        get += [
            "        if name in shapes:",
            "            value = value.reshape(shapes[name])",
        ]
    get += ["        full[name] = value"]
    wanted = "shapes.get(name, tensor.shape)" if reshaped else "tensor.shape"
    shapes = ["    shapes = user_shapes(stage)"] if reshaped else []
    lines = [
        *([_USER_SHAPES, "", ""] if reshaped else []),
        "def load_full_state_dict(stage: nn.Module, full: dict[str, torch.Tensor]) -> None:",
        '    """Fill this rank\'s part from all parameters and buffers, in the user\'s names and shapes.',
        "",
        "    Raises ValueError if one is missing or has another shape.",
        '    """',
        "    if any(p.is_meta for p in stage.parameters()):",
        '        stage.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")',
        *(["        stage.shards = [Shards(stage, optimized(stage).mesh)]"] if shards else []),
        f"    tensors = {every}",
        "    if missing := [name for name, _ in tensors if name not in full]:",
        '        raise ValueError(f"{len(missing)} of {len(tensors)} tensors are missing, such as {missing[0]}")',
        *shapes,
        "    with torch.no_grad():",
        "        for name, tensor in tensors:",
        f"            shape = tuple({wanted})",
        "            if full[name].shape != shape:",
        '                raise ValueError(f"{name} has shape {tuple(full[name].shape)}, the model\'s is {shape}")',
        *put,
        "",
        "",
        "def full_state_dict(stage: nn.Module) -> dict[str, torch.Tensor]:",
        '    """Parameters and buffers of this stage, whole on every rank, by the user\'s names and shapes."""',
        *shapes,
        "    full = {}",
        f"    for name, tensor in {every}:",
        *get,
        "    return full",
    ]
    return "\n".join(lines)


__all__ = [
    "KEEP_RESULTS", "build_stage", "local", "parameter", "recomputed", "run_block", "state_dicts", "weights",
]  # fmt: skip
