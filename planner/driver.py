"""The whole way in one function: model file -> captured graph -> search -> plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ..cost_models.errors import AutoparError
from ..cost_models.hardware import Cluster, cluster_with, cut_to
from ..cost_models.memory import COMPUTE_BYTES
from ..cost_models.optimizer import get_optimizer
from ..cost_models.stacks import load_stack
from .capture.graph import ModelGraph
from .plan import Plan, split_model
from .record import write_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a user asks for. `model` is "file.py" or "file.py:name"; None and an empty `mesh` leave it to the search."""

    model: str
    gpus: int
    arguments: Mapping[str, object] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    cluster: str = "h100-sxm"
    cluster_overrides: Mapping[str, float] = field(default_factory=dict)  # of OVERRIDES
    batch_size: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    stack: str = "eager"
    mesh: Mapping[str, int] = field(default_factory=dict)
    microbatch_size: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    zero: int | str | None = None  # of all blocks, or "h.{0..3}=2,*=3"
    activation_checkpoint: str | None = None
    zero_shard_size: int | None = None
    exact: bool = False
    time_limit_seconds: float | None = None
    tp_may_split_batch: bool = False
    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # rank -> how many times as long it takes
    batch_shares: tuple[int, ...] | None = None  # of each dp rank, in any unit
    exact_capture: bool = False  # capture by torch.export alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    plan: Plan
    graph: ModelGraph


def make_plan(request: PlanRequest, progress: Callable[[str], None] | None = None) -> Planned:
    """Capture the model, search, and write down the answer.

    Raises:
        AutoparError: bad options, files or pins.
        UnsupportedModel: the model cannot be captured.
        InfeasibleError: no plan fits.
    """
    cluster = check_request(request)
    say = progress or (lambda text: None)
    say("capturing the model")
    graph, named = capture(request)
    return plan_graph(graph, named, cluster, say)


def check_request(request: PlanRequest) -> Cluster:
    """Refuse options that no plan can have, before any work; the cluster.

    Raises:
        AutoparError: the option and the valid values.
    """
    cluster = cluster_with(request.cluster, request.cluster_overrides)
    cluster.check_gpus(request.gpus)
    cluster = cut_to(cluster, request.gpus)
    get_optimizer(request.optimizer)
    load_stack(request.stack)
    if request.precision not in COMPUTE_BYTES:
        known = ", ".join(COMPUTE_BYTES)
        raise AutoparError(f"there is no precision {request.precision!r}", fix=f"choose one of: {known}")
    if request.batch_size is not None and request.batch_size < 1:
        raise AutoparError(f"batch size {request.batch_size} is no batch", fix="give a positive number of samples")
    if request.microbatch_size is not None and request.microbatch_size < 1:
        raise AutoparError(
            f"microbatch size {request.microbatch_size} is none", fix="give a positive number of samples"
        )
    return cluster


def capture(request: PlanRequest) -> tuple[ModelGraph, PlanRequest]:
    """The graph of the request's model, and the request with the name of what was built and the converted arguments."""
    from .capture import capture_model

    path, name = split_model(request.model)
    captured = capture_model(
        path,
        name=name,
        arguments=request.arguments,
        inputs=request.inputs,
        batch_size=request.batch_size,
        is_exact=request.exact_capture,
    )
    loaded = captured.loaded
    return captured.graph, replace(request, model=f"{path}:{loaded.name}", arguments=loaded.arguments)


def plan_graph(
    graph: ModelGraph, request: PlanRequest, cluster: Cluster, progress: Callable[[str], None] | None = None
) -> Planned:
    """Search the plan of a captured graph.

    Raises:
        UnsupportedModel: it draws random numbers from no seed.
        InfeasibleError: no plan fits.
    """
    from .search.infeasible import explain
    from .search.pins import Pins
    from .search.sweep import NothingFits, Setting, search
    from .sharding.seeds import refuse_unseeded

    refuse_unseeded(graph)
    pins = Pins(
        mesh=dict(request.mesh),
        microbatch_size=request.microbatch_size,
        schedule=request.schedule,
        stages_per_rank=request.stages_per_rank,
        zero=request.zero,
        activation_checkpoint=request.activation_checkpoint,
        zero_shard_size=request.zero_shard_size,
        batch_shares=request.batch_shares,
    )
    pins.check()
    setting = Setting(
        graph=graph,
        gpus=request.gpus,
        cluster=cluster,
        stack=load_stack(request.stack),
        precision=request.precision,
        optimizer=request.optimizer,
        pins=pins,
        exact=request.exact,
        tp_may_split_batch=request.tp_may_split_batch,
        slow_ranks=request.slow_ranks,
        time_limit_seconds=request.time_limit_seconds,
    )
    try:
        found = search(setting, progress)
    except NothingFits as nothing:
        raise explain(setting, nothing, lambda size: capture(replace(request, batch_size=size))[0]) from None
    return Planned(plan=write_plan(request, setting, found), graph=graph)
