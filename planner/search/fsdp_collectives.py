"""How often FSDP2 and ZeRO-1 gather and reduce the parameters of a stage in one step of a schedule.

What was measured with PyTorch 2.13, and is relied on:

- FSDP2 gathers one flat buffer per module; every parameter's dim 0 is padded to a multiple of the axis. Gradients are
  reduce-scattered once a step, in the same layout, without the frozen parameters.
- With reshard_after_forward=False (ZeRO-2) and gradients accumulated, a module is gathered once a step.
- With reshard_after_forward=True (ZeRO-3) each forward and each backward gathers, except where the backward before has
  kept the parameters: pipeline schedules (and the emitted loop) reshard only after the last backward. A gather happens
  at each forward that follows no backward, and at the first of consecutive backwards: microbatches + 1 a step without
  a pipeline, for GPipe and for 1F1B.
- The root, what lies outside the blocks, is not resharded after a forward where there are blocks: gathered once a step.
- A recomputation under FSDP gathers nothing more: the hook before the backward has already gathered.
- Schedules of lists of stages (`Schedule.is_multi_stage`) also gather a stage whole before its first action, as one of
  the next three that the rank works on, and reshard it when it is none of them.
- A split backward looks for gradients of the parameters that the stage holds when its parts begin. So the emitted code
  has them whole before I and W, as nothing of W alone would: a forward between the two is followed by another gather.
  The first stage does its whole backward in W.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache

from ...cost_models.timeline import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from ..schedules import action_table, get_schedule
from ..sharding.mesh import Mesh
from ..zero import FREED
from .held_parameters import HeldParameter, padded_bytes

_STAGES_AHEAD = 3  # default of torch.distributed.pipelining.schedules._add_unshard_reshard


def fsdp_collectives(
    held: Iterable[HeldParameter], mesh: Mesh, gathers: Mapping[str, int]
) -> Iterator[tuple[str, str, int, int]]:
    """(axis, operation, bytes, count) of one stage: over all of dp and cp, or within groups of it (dp_shard) whose
    gradients are then added up (dp_replicate). `gathers`: of each group."""
    axis, shards = "dp_shard" if mesh.replicas > 1 else mesh.state_axis, mesh.shards
    gathered: Counter[str] = Counter()
    scattered: Counter[str] = Counter()
    for parameter in held:
        gathered[parameter.group] += padded_bytes(parameter, shards)
        if parameter.trainable:
            scattered[parameter.group] += padded_bytes(parameter, shards)
    for group, num_bytes in gathered.items():
        yield axis, "all_gather", num_bytes, gathers[group]
        if scattered[group]:
            yield axis, "reduce_scatter", scattered[group], 1
            if mesh.replicas > 1:
                yield "dp_replicate", "all_reduce", scattered[group] // shards, 1


def zero1_collectives(held: Iterable[HeldParameter], shards: int) -> Iterator[tuple[str, int, int]]:
    """(operation, bytes, count) of a rank: whole parameters gathered from the parts that other ranks have updated,
    whole gradients added up into the parts."""
    gathered: Counter[tuple[str, str]] = Counter()
    scattered: Counter[tuple[str, str]] = Counter()
    for parameter in held:
        size = padded_bytes(parameter, shards, zero=1)
        gathered[parameter.group, parameter.dtype] += size if parameter.dp_dim(1) is not None else 0
        scattered[parameter.group, parameter.dtype] += size if parameter.trainable else 0
    for op, sizes in (("all_gather", gathered), ("reduce_scatter", scattered)):
        for num_bytes in filter(None, sizes.values()):
            yield op, num_bytes, 1


@cache
def gathers_a_step(
    schedule: str, ranks: int, microbatches: int, stages_per_rank: int, stage: int, zero: int
) -> tuple[int, int]:
    """(of a block, of the root) on a stage."""
    order = get_schedule(schedule)
    if not order.is_multi_stage:
        return (1 if zero == 2 else microbatches + 1), 1
    actions = action_table(schedule, ranks, microbatches, stages_per_rank).by_rank[order.rank_of(stage, ranks)]
    of_block, of_root = (_gathers(actions, stage, reshards=each) for each in (zero == FREED, False))
    return of_block.total(), of_root.total()


@cache
def gathers_waited_for(schedule: str, ranks: int, microbatches: int, stages_per_rank: int, stage: int) -> int:
    """How many gathers of a block that is freed the stage waits for before it computes: those ahead of I and of W."""
    order = get_schedule(schedule)
    if not order.splits_backward or not stage:
        return 0
    actions = action_table(schedule, ranks, microbatches, stages_per_rank).by_rank[order.rank_of(stage, ranks)]
    found = _gathers(actions, stage, reshards=True)
    return found[INPUT_GRADIENT] + found[WEIGHT_GRADIENT]


def _gathers(actions: tuple[Action, ...], stage: int, *, reshards: bool) -> Counter[str]:
    """By the kind of the action that gathers, "" ahead of any. `reshards`: whether a forward ends with a reshard."""
    found: Counter[str] = Counter()
    is_active = is_whole = False

    def gather(kind: str) -> None:
        nonlocal is_whole
        found[kind] += not is_whole
        is_whole = True

    for action, following in zip(actions, _next_stages(actions), strict=True):
        is_next = stage in following
        if is_next and not is_active:
            gather("")
        elif is_active and not is_next:
            is_whole = False
        is_active = is_next
        if action.stage != stage:
            continue
        if action.kind != INPUT_GRADIENT or stage:
            gather(action.kind)
        if action.kind == FORWARD and reshards:
            is_whole = False
    return found


@lru_cache(maxsize=1)  # the stages of a rank are asked for one after the other
def _next_stages(actions: tuple[Action, ...]) -> list[tuple[int, ...]]:
    """By action the first stages that are worked on from there on."""
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for action in reversed(actions):
        following = (action.stage, *(stage for stage in following if stage != action.stage))[:_STAGES_AHEAD]
        found.append(following)
    return found[::-1]


__all__ = ["fsdp_collectives", "gathers_a_step", "gathers_waited_for", "zero1_collectives"]
