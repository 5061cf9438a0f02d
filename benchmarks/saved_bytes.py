"""Bytes that plans predict against bytes that their emitted packages keep on CPU ranks.

    python benchmarks/saved_bytes.py [--only gpt,llama] [--strategy dp2,full] [--json]

For every sample model and strategy: what autograd keeps of one microbatch, counted with `saved_tensors_hooks` (unique
storages, without parameters and inputs), and parameters, gradients and optimizer state on the fullest rank of a stage.
Exit code 5 if a prediction is not exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from autopar.compiler.package import emit_package
from autopar.compiler.verify.saved import StageBytes, compare_bytes
from autopar.cost_models.errors import AutoparError
from autopar.planner.driver import PlanRequest, make_plan

SAMPLE_MODELS = Path(__file__).resolve().parent.parent / "sample_models"
EXIT_DIFFERS = 5

# model -> (batch size, arguments)
MODELS: Mapping[str, tuple[int, Mapping[str, object]]] = {
    "gpt": (16, {"num_layers": 4}),
    "gpt, dropout": (16, {"num_layers": 2, "dropout": 0.1}),
    "llama": (16, {"num_layers": 4}),
    "moe": (16, {"num_layers": 2}),
    "mlp": (64, {}),
    "resnet": (8, {}),
    "matrix_factorization": (64, {}),
    "logistic_regression": (64, {}),
}
_SPLIT: Mapping[str, Any] = {"schedule": "zero-bubble", "stages_per_rank": 1, "microbatch_size": 2}
# strategy -> (mesh, other pins)
STRATEGIES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "one rank": ({"dp": 1, "tp": 1, "pp": 1}, {}),
    "dp2": ({"dp": 2, "tp": 1, "pp": 1}, {"zero": 0}),
    "dp2, ZeRO-3": ({"dp": 2, "tp": 1, "pp": 1}, {"zero": 3}),
    "dp2, checkpointed": ({"dp": 2, "tp": 1, "pp": 1}, {"activation_checkpoint": "full"}),
    "tp2": ({"dp": 1, "tp": 2, "pp": 1}, {}),
    "tp4, checkpointed": ({"dp": 1, "tp": 4, "pp": 1}, {"activation_checkpoint": "full"}),
    "pp2": ({"dp": 1, "tp": 1, "pp": 2}, {"schedule": "gpipe"}),
    "pp2, I and W": ({"dp": 1, "tp": 1, "pp": 2}, _SPLIT),
    "pp2, I W, full": ({"dp": 1, "tp": 1, "pp": 2}, {**_SPLIT, "activation_checkpoint": "full"}),
    "pp2, I W, selective": ({"dp": 1, "tp": 1, "pp": 2}, {**_SPLIT, "activation_checkpoint": "selective"}),
    "pp2 dp2, I W, ZeRO-3": (
        {"dp": 2, "tp": 1, "pp": 2},
        {**_SPLIT, "activation_checkpoint": "full", "zero": 3},
    ),
    "dp2 tp2": ({"dp": 2, "tp": 2, "pp": 1}, {}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model under one strategy; `refused` says why there is no plan."""

    model: str
    strategy: str
    plan: str = ""
    stages: tuple[StageBytes, ...] = field(default=())
    refused: str = ""

    @property
    def is_equal(self) -> bool:
        return all(stage.is_equal for stage in self.stages)


def row_of(model: str, strategy: str) -> Row:
    """Plan, emit, run, compare."""
    batch_size, arguments = MODELS[model]
    mesh, pins = STRATEGIES[strategy]
    request = PlanRequest(
        model=str(SAMPLE_MODELS / f"{model.partition(',')[0]}.py"),
        arguments=arguments,
        gpus=prod(mesh.values()),
        batch_size=batch_size,
        cluster="cpu-local",
        mesh=mesh,
        **pins,
    )
    try:
        planned = make_plan(request)
    except AutoparError as error:
        return Row(model=model, strategy=strategy, refused=str(error).splitlines()[0])
    plan = planned.plan
    with tempfile.TemporaryDirectory(prefix="autopar-bytes-") as folder:
        package = Path(folder, "package")
        emit_package(plan, planned.graph, package, force=False)
        stages = compare_bytes(plan, package, planned.graph)
    how = f"m={plan.microbatches} {plan.schedule} ZeRO-{plan.zero} checkpoint={plan.activation_checkpoint}"
    return Row(model=model, strategy=strategy, plan=how, stages=tuple(stages))


def lines_of(row: Row) -> Iterator[str]:
    """A row as text, a line for each stage."""
    if row.refused:
        yield f"{row.model:<22}{row.strategy:<19}refused: {row.refused}"
    for stage in row.stages:
        state = [name for name in stage.predicted if name != "activations"]
        off = [f"{name} {stage.predicted[name]:,} / {stage.counted[name]:,}" for name in state
               if stage.predicted[name] != stage.counted[name]]  # fmt: skip
        yield (
            f"{row.model:<22}{row.strategy:<19}{stage.stage:>5}{stage.predicted['activations']:>14,}"
            f"{stage.counted['activations']:>14,}  {'; '.join(off) or 'equal':<10}  {row.plan}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], choices=list(MODELS), help="a model (repeatable)")
    parser.add_argument("--strategy", action="append", default=[], choices=list(STRATEGIES), help="(repeatable)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)
    if not given.json:
        print(f"{'model':<22}{'strategy':<19}{'stage':>5}{'predicted':>14}{'counted':>14}  states")
    rows: list[Row] = []
    for model in given.only or MODELS:
        for strategy in given.strategy or STRATEGIES:
            rows.append(row_of(model, strategy))
            if not given.json:
                print("\n".join(lines_of(rows[-1])), flush=True)
    wrong = [row for row in rows if not row.is_equal]
    if given.json:
        print(json.dumps({"schema_version": 1, "differ": len(wrong), "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print(f"{len(rows)} rows, {sum(bool(row.refused) for row in rows)} refused, {len(wrong)} differ")
    return EXIT_DIFFERS if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
