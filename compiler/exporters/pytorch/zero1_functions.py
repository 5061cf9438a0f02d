"""Functions of sharded_model.py under ZeRO-1: every rank holds whole parameters and gradients, its optimizer a part.

The parts are DTensors under the same names, so an optimizer, a checkpoint and clipping take them as they are. Gradients
are reduce-scattered into them and parameters gathered from them, a block at a time: together as many bytes as one
all_reduce, and no buffer larger than a block. (torch's ZeroRedundancyOptimizer hands out whole parameters, sends them
by broadcasts, and has no checkpoint that another number of ranks can read.)
"""

from __future__ import annotations

from collections.abc import Sequence

from ....planner.sharding.mesh import AXES
from ...text import layout
from .meshes import beside, states_of

_SHARDS = '''\
class Shards(nn.Module):
    """This rank's part of every parameter of a module, under the same names: a view, which the optimizer updates."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh):
        super().__init__()
        self.mesh = mesh
        for name, p in module.named_parameters(recurse=False):
            setattr(self, name, shard(p, mesh))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(self, name, buffer)
        for name, child in module.named_children():
            setattr(self, name, Shards(child, mesh))


def shard(p: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's part along DIM; all of it where there is none."""
CHOOSE
    if dim is not None:
        rows = -(-part.shape[dim] // SIZE)
        start = min(STATES.get_local_rank() * rows, part.shape[dim])
        part, place = part.narrow(dim, start, min(rows, part.shape[dim] - start)), Shard(dim)
SPLIT
    return nn.Parameter(split, requires_grad=p.requires_grad)'''
_WITH_OTHERS = """\
    taken = [place.dim for place in p.placements if isinstance(place, Shard)]
    dim = next((dim for dim in range(p.ndim) if dim not in taken), None)
    part, place = local(p).detach(), Replicate()"""
_ALONE = """\
    dim = 0 if p.ndim else None
    part, place = p.detach(), Replicate()"""

OPTIMIZED = '''\
def optimized(stage: nn.Module) -> nn.Module:
    """The module whose parameters the optimizer updates and a checkpoint holds."""
    return stage.shards[0]'''
OPTIMIZED_OF_SEVERAL = '''\
def optimized(stage: nn.Module) -> nn.Module:
    """The module (of a list of stages, the list) whose parameters the optimizer updates and a checkpoint holds."""
    return nn.ModuleList(map(optimized, stage)) if isinstance(stage, nn.ModuleList) else stage.shards[0]'''

_GROUPS = '''\
def groups(stage: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """(parameter, this rank's part of it): those of each block together, then the others."""
    inside = set()
    for module, shards in zip(stage.modules(), optimized(stage).modules(), strict=True):
        if isinstance(module, BLOCKS):
            pairs = list(zip(module.parameters(), shards.parameters(), strict=True))
            inside.update(p for p, _ in pairs)
            yield pairs
    outside = zip(stage.parameters(), optimized(stage).parameters(), strict=True)
    yield [pair for pair in outside if pair[0] not in inside]'''
_ONE_GROUP = '''\
def groups(stage: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """(parameter, this rank's part of it): all together."""
    yield list(zip(stage.parameters(), optimized(stage).parameters(), strict=True))'''
_BY_DTYPE = '''\
def groups(stage: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """(parameter, this rank's part of it), of one dtype at a time."""
    for pairs in mixed_groups(stage):
        for dtype in sorted({p.dtype for p, _ in pairs}, key=str):
            yield [pair for pair in pairs if pair[0].dtype == dtype]'''

_EXCHANGE = '''\
def dp_parts(whole: torch.Tensor, part: nn.Parameter) -> torch.Tensor:
    """(SIZE, ...): a tensor that is split as `part` is, cut for all ranks and padded to parts of equal size."""
    place = part.placements[0]
    if not isinstance(place, Shard):
        return whole.expand(SIZE, *whole.shape)
    shape = list(whole.shape)
    rows = -(-shape[place.dim] // SIZE)
    shape[place.dim] = rows * SIZE - shape[place.dim]
    if shape[place.dim]:
        whole = torch.cat((whole, whole.new_zeros(shape)), place.dim)
    return whole.unflatten(place.dim, (SIZE, rows)).movedim(place.dim, 0)


@torch.no_grad()
def gather_parameters(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Fill the parameters from the parts of all ranks, which their optimizers have updated."""
    for pairs in groups(stage):
        pairs = [(WHOLE, part) for p, part in pairs if isinstance(part.placements[0], Shard)]
        if not pairs:
            continue
        parts = [dp_parts(p, part) for p, part in pairs]
        mine = torch.cat([each[STATES.get_local_rank()].flatten() for each in parts])
        bucket = mine.new_empty(SIZE, mine.numel())
        dist.all_gather_single(bucket.view(-1), mine, group=STATES.get_group())
        gathered = bucket.split([each[0].numel() for each in parts], dim=1)
        for (p, part), each, of_ranks in zip(pairs, parts, gathered, strict=True):
            shape, dim = each.shape[1:], part.placements[0].dim
            for rows, values in zip(p.split(shape[dim], dim), of_ranks, strict=False):
                rows.copy_(values.view(shape).narrow(dim, 0, rows.shape[dim]))


def scatter_gradients(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Add up gradients; each rank keeps those of its part."""
    for pairs in groups(stage):
        pairs = [(p, part) for p, part in pairs if p.grad is not None]
        if not pairs:
            continue
        parts = [dp_parts(GRADIENT, part) for p, part in pairs]
        bucket = torch.cat([each.flatten(1) for each in parts], dim=1)
        total = bucket.new_empty(bucket.shape[1])
        dist.reduce_scatter_single(total, bucket.view(-1), group=STATES.get_group())
        reduced = total.split([each[0].numel() for each in parts])
        for (p, part), each, flat in zip(pairs, parts, reduced, strict=True):
            mine, place = flat.view(each.shape[1:]), part.placements[0]
            if isinstance(place, Shard):
                mine = mine.narrow(place.dim, 0, part.to_local().shape[place.dim])
            part.grad = DTensor.from_local(
                mine, part.device_mesh, part.placements, run_check=False, shape=part.shape, stride=part.stride()
            )
            p.grad = None'''


def shards(axes: Sequence[str], *, over: str) -> str:
    """The class of the parts, and how a parameter is cut. `axes`: those on which parameters are DTensors already;
    `over`: the axis whose ranks have the parts."""
    whole = f"the first dim that {' and '.join(axes)} {'leaves' if len(axes) == 1 else 'leave'} whole"
    text = _SHARDS.replace("DIM", whole if axes else "the first dim")
    text = text.replace("CHOOSE", _WITH_OTHERS if axes else _ALONE)
    placed = f"{beside(over, axes, of_mesh=AXES)}, {'(place, *p.placements)' if axes else '(place,)'}"
    made = f"split = DTensor.from_local(part, {placed}, run_check=False, shape=p.shape, stride=p.stride())"
    return _named(text.replace("SPLIT", "\n".join(layout(made, "    "))), over)


def groups(blocks: Sequence[str], *, several_dtypes: bool) -> str:
    """What is exchanged together. `blocks`: the classes of repeated blocks."""
    if blocks:
        kinds = blocks[0] if len(blocks) == 1 else f"({', '.join(blocks)})"
        line = "        if isinstance(module, BLOCKS):"
        text = _GROUPS.replace(line, "\n".join(layout(f"if isinstance(module, {kinds}):", "        ")))
    else:
        text = _ONE_GROUP
    return f"{text.replace('def groups', 'def mixed_groups')}\n\n\n{_BY_DTYPE}" if several_dtypes else text


def _named(text: str, over: str) -> str:
    return text.replace("STATES", states_of(over)).replace("SIZE", over.upper())


def exchange(axes: Sequence[str], *, over: str) -> str:
    """The two directions: parameters gathered before a step's forward, gradients scattered after its last backward."""
    text = _EXCHANGE.replace("WHOLE", "local(p)" if axes else "p")
    return _named(text.replace("GRADIENT", "local_gradient(p)" if axes else "p.grad"), over)


__all__ = ["OPTIMIZED", "OPTIMIZED_OF_SEVERAL", "exchange", "groups", "shards"]
