"""The free plan beside what experts published for the same model, cluster and batch; priced alike.

    python benchmarks/hand_plans.py [--only NAME] [--time-limit-seconds 120] [--json]

Exits with 5 where a free plan is predicted slower than the experts' configuration. What a source leaves out (the
schedule, stages per rank) is chosen best for the experts too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.planner.driver import PlanRequest, capture, check_request, plan_graph
from autopar.planner.errors import AutoparError
from autopar.planner.explain import comparison
from autopar.planner.plan import Plan
from autopar.planner.summary import decision_line

MODELS = Path(__file__).parents[1] / "sample_models"
CHECK_FAILED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hand:
    """A configuration of experts. `row`: its id in benchmarks/data/runs.csv, which has the source."""

    name: str
    row: str
    file: str
    arguments: Mapping[str, object]
    gpus: int
    cluster: str
    batch_size: int
    mesh: Mapping[str, int]
    microbatch_size: int
    zero: int
    activation_checkpoint: str
    schedule: str | None = None
    cluster_overrides: Mapping[str, float] = field(default_factory=dict)


HANDS = (
    Hand(
        name="llama-3 8B, 8 H100 (torchtitan)",
        row="titan-t1-1",
        file="llama.py",
        arguments={"preset": "8b"},
        gpus=8,
        cluster="h100-sxm",
        cluster_overrides={"hbm_gib": 96.0},  # Grand Teton's 96 GB parts
        batch_size=16,
        mesh={"dp": 8},
        microbatch_size=2,
        zero=3,
        activation_checkpoint="selective",
    ),
    Hand(
        name="llama-3 70B, 64 H100 (Megatron Bridge; there in FP8, here in bf16)",
        row="mbridge-261",
        file="llama.py",
        arguments={"preset": "70b"},
        gpus=64,
        cluster="h100-sxm",
        batch_size=128,
        mesh={"tp": 4, "pp": 8, "dp": 2},
        microbatch_size=1,
        zero=1,
        activation_checkpoint="none",
    ),
    Hand(
        name="llama-3 405B, 8,192 H100 (Llama 3 paper)",
        row="llama3-405b-1",
        file="llama.py",
        arguments={"preset": "405b"},
        gpus=8192,
        cluster="h100-sxm",
        batch_size=2048,
        mesh={"tp": 8, "pp": 16, "dp": 64},
        microbatch_size=1,
        zero=2,
        activation_checkpoint="none",
    ),
    Hand(
        name="GPT-3 175B, 384 A100 (Megatron, Narayanan et al.)",
        row="narayanan-t2-07",
        file="gpt.py",
        arguments={
            "vocab_size": 51200, "context": 2048, "num_layers": 96, "num_heads": 96, "width": 12288, "dropout": 0.0,
        },
        gpus=384,
        cluster="a100-80g-sxm",
        batch_size=1536,
        mesh={"tp": 8, "pp": 12, "dp": 4},
        microbatch_size=1,
        zero=0,
        activation_checkpoint="full",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Both plans of a case; `hand` None: the experts' configuration does not fit what we would emit, for `refusal`."""

    name: str
    row: str
    free: Plan
    hand: Plan | None
    refusal: str
    seconds: float

    @property
    def is_slower(self) -> bool:
        return self.hand is not None and self.free.step_seconds > self.hand.step_seconds * (1 + 1e-9)


def run(hand: Hand, time_limit_seconds: float) -> Outcome:
    """Capture once, plan freely, then price the experts' pins."""
    request = PlanRequest(
        model=str(MODELS / hand.file),
        arguments=hand.arguments,
        gpus=hand.gpus,
        cluster=hand.cluster,
        cluster_overrides=hand.cluster_overrides,
        batch_size=hand.batch_size,
        precision="bf16",
        time_limit_seconds=time_limit_seconds,
    )
    cluster = check_request(request)
    graph, named = capture(request)
    begin = time.perf_counter()
    free = plan_graph(graph, named, cluster).plan
    seconds = time.perf_counter() - begin
    pinned = replace(
        named,
        mesh=hand.mesh,
        microbatch_size=hand.microbatch_size,
        zero=hand.zero,
        activation_checkpoint=hand.activation_checkpoint,
        schedule=hand.schedule,
    )
    try:
        found, refusal = plan_graph(graph, pinned, cluster).plan, ""
    except AutoparError as error:
        found, refusal = None, str(error)
    return Outcome(name=hand.name, row=hand.row, free=free, hand=found, refusal=refusal, seconds=seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--time-limit-seconds", type=float, default=120.0, help="of each free search")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    outcomes = [run(hand, arguments.time_limit_seconds) for hand in HANDS if arguments.only in hand.name]
    if arguments.json:
        print(json.dumps([_as_json(outcome) for outcome in outcomes], indent=2))
    else:
        for outcome in outcomes:
            print("\n".join(_lines(outcome)), flush=True)
    return CHECK_FAILED if any(outcome.is_slower for outcome in outcomes) else 0


def _lines(outcome: Outcome) -> list[str]:
    free, hand = outcome.free, outcome.hand
    lines = [f"{outcome.name}  [{outcome.row}]"]
    lines.append(f"  autopar  {free.step_seconds:8.3f} s  {decision_line(free)}  (searched {outcome.seconds:.1f} s)")
    if hand is None:
        return [*lines, f"  experts  do not fit what autopar emits: {outcome.refusal}", ""]
    lines.append(f"  experts  {hand.step_seconds:8.3f} s  {decision_line(hand)}")
    return [*lines, f"  why      {comparison(free, hand)}", ""]


def _as_json(outcome: Outcome) -> Mapping[str, object]:
    hand = outcome.hand
    return {
        "name": outcome.name,
        "row": outcome.row,
        "free": {"decision": decision_line(outcome.free), "step_seconds": outcome.free.step_seconds},
        "hand": {"decision": decision_line(hand), "step_seconds": hand.step_seconds} if hand else None,
        "refusal": outcome.refusal,
        "search_seconds": outcome.seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
