"""Models and strategies on two ranks, and the plan of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.planner.driver import Planned, PlanRequest, capture, check_request, plan_graph

SAMPLE_MODELS = Path(__file__).resolve().parents[2] / "sample_models"
RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A sample model in a size whose step takes tens of milliseconds on one core."""

    model: str
    batch_size: int
    arguments: Mapping[str, object] = field(default_factory=dict)


CASES = (
    Case(model="mlp", batch_size=256, arguments={"num_features": 256, "width": 512, "num_hidden": 8}),
    Case(
        model="gpt",
        batch_size=16,
        arguments={"num_layers": 4, "width": 128, "num_heads": 4, "context": 64, "vocab_size": 512},
    ),
    Case(
        model="llama",
        batch_size=16,
        arguments={
            "num_layers": 4, "width": 128, "num_heads": 4, "num_kv_heads": 2, "hidden": 384, "context": 64,
            "vocab_size": 512,
        },
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """What is pinned; placements are left to the search. `mesh`: the axis of both ranks, "" to pin nothing."""

    mesh: str
    microbatches: int = 1
    schedule: str | None = None
    zero: int | None = None
    activation_checkpoint: str = "none"

    @property
    def name(self) -> str:
        if not self.mesh:
            return "planner's choice"
        parts = [f"{self.mesh}=2", f"m={self.microbatches}"]
        parts += [self.schedule] if self.schedule else []
        parts += [f"zero={self.zero}"] if self.zero is not None else []
        parts += ["full"] if self.activation_checkpoint == "full" else []
        return " ".join(parts)


STRATEGIES = (
    Strategy(mesh=""),
    Strategy(mesh="dp", zero=0),
    Strategy(mesh="dp", zero=1),
    Strategy(mesh="dp", zero=2),
    Strategy(mesh="dp", zero=3),
    Strategy(mesh="dp", zero=0, microbatches=4),
    Strategy(mesh="dp", zero=2, microbatches=4),
    Strategy(mesh="dp", zero=3, microbatches=4),
    Strategy(mesh="dp", zero=0, activation_checkpoint="full"),
    Strategy(mesh="dp", zero=3, activation_checkpoint="full"),
    Strategy(mesh="tp"),
    Strategy(mesh="tp", microbatches=4),
    Strategy(mesh="tp", activation_checkpoint="full"),
    Strategy(mesh="pp", microbatches=2, schedule="gpipe"),
    Strategy(mesh="pp", microbatches=4, schedule="gpipe"),
    Strategy(mesh="pp", microbatches=2, schedule="1f1b"),
    Strategy(mesh="pp", microbatches=4, schedule="1f1b"),
    Strategy(mesh="pp", microbatches=8, schedule="1f1b"),
    Strategy(mesh="pp", microbatches=4, schedule="1f1b", activation_checkpoint="full"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A strategy and its plan."""

    strategy: Strategy
    planned: Planned

    @property
    def name(self) -> str:
        """The strategy; of the planner's own choice what it is."""
        plan = self.planned.plan
        if self.strategy.mesh:
            return self.strategy.name
        axis = next((name for name, size in plan.mesh.items() if size > 1), "one rank")
        zero = plan.zero if axis == "dp" else None
        schedule = plan.schedule if axis == "pp" else None
        chosen = Strategy(
            mesh=axis, microbatches=plan.microbatches, schedule=schedule, zero=zero,
            activation_checkpoint=plan.activation_checkpoint,
        )  # fmt: skip
        return f"chosen: {chosen.name}"


def planned_jobs(case: Case, cluster: str) -> tuple[Job, ...]:
    """The plan of every strategy on the cluster."""
    request = PlanRequest(
        model=str(SAMPLE_MODELS / f"{case.model}.py"),
        gpus=RANKS,
        arguments=case.arguments,
        cluster=cluster,
        batch_size=case.batch_size,
    )
    graph, request = capture(request)
    return tuple(
        Job(strategy=strategy, planned=plan_graph(graph, pinned, check_request(pinned)))
        for strategy in STRATEGIES
        for pinned in [_pinned(request, case, strategy)]
    )


def _pinned(request: PlanRequest, case: Case, strategy: Strategy) -> PlanRequest:
    if not strategy.mesh:
        return request
    mesh = {"pp": 1, "dp": 1, "tp": 1, strategy.mesh: RANKS}
    return replace(
        request,
        mesh=mesh,
        microbatch_size=case.batch_size // mesh["dp"] // strategy.microbatches,
        schedule=strategy.schedule,
        zero=strategy.zero,
        activation_checkpoint=strategy.activation_checkpoint,
    )
