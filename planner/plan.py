"""The plan: the answer of the search as data, and its JSON form. All that compiler/ reads beside the graph.

A plan is data from outside (a person may have edited it): `plan_from_json` validates it against the schema beside this
file and no string of it is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA_VERSION = 1
IS_OPTIONAL = "is_optional"


def _optional() -> Any:
    """A mapping that plan.json leaves out where it is empty."""
    return field(default_factory=dict, metadata={IS_OPTIONAL: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """How to build the model again. `path` is relative to the folder of plan.json where that is possible."""

    path: str
    name: str  # function, class or instance in the file
    arguments: Mapping[str, object]
    inputs: Mapping[str, str]  # --input name -> "int64[B,1024]"; empty: from the file


def split_model(model: str) -> tuple[str, str | None]:
    """ "file.py:name" -> ("file.py", "name")."""
    path, colon, name = model.rpartition(":")
    return (path, name) if colon and path.endswith((".py", ".json")) else (model, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Units [first, last) of the model graph on one pipeline stage; the prelude is on every stage that needs it.

    Where dp ranks take different shares of the batch, the times are those of the first, and the memory that of the
    one with least to spare.
    Where a rank holds several stages, `memory_bytes` is what this one needs of it, without the overhead.
    """

    first: int
    last: int
    fqns: tuple[str, ...]  # patterns over repeated blocks, "h.{0..5}", for people
    num_parameters: int
    forward_seconds: float  # of one microbatch on one rank
    backward_seconds: float
    step_seconds: float  # once a step: gradient reduction, optimizer
    memory_bytes: Mapping[str, int]  # component -> peak bytes on one rank; "total" is their sum
    rank: int  # on pp
    # What the simulated step takes for an action of each kind, the host's part included: "F", and "B" or "I" and "W".
    action_seconds: Mapping[str, float] = _optional()
    send_seconds: float = 0.0  # one microbatch's message to the next stage

    @property
    def total_bytes(self) -> int:
        return self.memory_bytes["total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePlan:
    """Collectives of one rank in a whole step, of one kind, axis and payload size; of the first dp rank."""

    stage: int  # rank on pp: the number of the stage, where ranks hold one
    axis: str  # "tp", "cp", "ep", "dp", "dp_cp", "dp_shard", "dp_replicate", "pp", "world", "tied"
    op: str
    count: int
    num_bytes: int  # payload of each
    # "forward", "backward", "recompute", "step", "fsdp", "zero1", "partial gradients", "clip", "tied", "loss", "stage"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A runner-up."""

    mesh: Mapping[str, int]
    microbatches: int
    schedule: str
    zero: int
    activation_checkpoint: str
    step_seconds: float | None  # None: does not fit
    memory_bytes: int
    note: str = ""  # what people ask for by name: "dp only", "ZeRO-3 only"
    time_breakdown_seconds: Mapping[str, float] = _optional()  # as of the plan
    memory_breakdown_bytes: Mapping[str, int] = _optional()  # component -> bytes, of the fullest stage
    stages_per_rank: int = 1
    batch_shares: tuple[int, ...] = field(default=(), metadata={IS_OPTIONAL: True})  # as of the plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """status: "optimal" | "within gap" | "time limit"; `bound_seconds` is a proven lower bound of the step time."""

    solver: str
    status: str
    bound_seconds: float
    gap_fraction: float
    candidates: int  # outer candidates considered
    solved: int  # of these solved by ILP
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the search decided, and what it predicts.

    `placements`: template pattern -> node name -> axis -> option label or pair text; R and "none" are left out.
    `tensors`: parameter FQN pattern -> axis -> pair text, for people and diff; derived from `placements`.
    """

    autopar_version: str
    torch_version: str
    fingerprint: str
    model: ModelSource
    cluster: str  # name of a catalogue entry, or path of the file
    gpus: int
    batch_size: int
    precision: str  # "fp32" | "bf16" | "fp16"
    optimizer: str  # "adamw" | "sgd"
    stack: str
    mesh: Mapping[str, int]  # pp, dp, tp; ep and cp only where they have more than one rank
    microbatches: int
    schedule: str  # a file of schedules/: "none", "1f1b" ...
    zero: int  # 3 where blocks differ, as `zero_by_block` says
    activation_checkpoint: str  # "none" | "selective" | "full" | "mixed": as `checkpoint_by_block` says
    stages: tuple[StagePlan, ...]  # in the order of the model
    placements: Mapping[str, Mapping[str, Mapping[str, str]]]
    tensors: Mapping[str, Mapping[str, str]]
    tensor_shapes: Mapping[str, tuple[int, ...]]  # by the same patterns
    step_seconds: float
    bubble_fraction: float
    memory_capacity_bytes: int
    collectives: tuple[CollectivePlan, ...]
    time_breakdown_seconds: Mapping[str, float]  # compute, tp, dp, pp, bubble, optimizer ...; sums to step_seconds
    alternatives: tuple[Alternative, ...]
    solver: SolverReport
    pins: Mapping[str, str]  # option name -> value the user fixed
    notes: tuple[str, ...] = ()
    checkpoint_by_block: Mapping[str, str] = _optional()  # pattern -> policy of every block, where they are mixed
    zero_by_block: Mapping[str, int] = _optional()  # pattern -> 2 or 3 for every block, where they are mixed
    zero_shard_size: int = field(default=0, metadata={IS_OPTIONAL: True})  # ranks that ZeRO-2 and 3 split over; 0: all
    # The microbatches of each dp rank where they differ; `microbatches` is then their mean. Empty: all take as many.
    batch_shares: tuple[int, ...] = field(default=(), metadata={IS_OPTIONAL: True})
    # Beside them, by dp rank, of each rank on pp: how many times as long as the fastest device it takes.
    dp_paces: tuple[tuple[float, ...], ...] = field(default=(), metadata={IS_OPTIONAL: True})
    cluster_overrides: Mapping[str, float] = _optional()  # facts of the cluster that the user gave: hbm_gib ...
    # By rank on pp, of all its stages together: component -> bytes. Empty where every rank holds one stage.
    rank_memory_bytes: tuple[Mapping[str, int], ...] = field(default=(), metadata={IS_OPTIONAL: True})

    @property
    def stages_per_rank(self) -> int:
        return sum(stage.rank == 0 for stage in self.stages)

    @property
    def memory_by_rank(self) -> tuple[Mapping[str, int], ...]:
        """Component -> bytes, by rank on pp."""
        return self.rank_memory_bytes or tuple(stage.memory_bytes for stage in self.stages)
