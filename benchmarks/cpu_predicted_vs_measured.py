"""Predicted against measured step seconds on CPU ranks: profile this machine, plan, emit, run, compare.

    python benchmarks/cpu_predicted_vs_measured.py [--rounds 9] [--cluster my.toml] [--only mlp,gpt] [--json]

Every model is planned for two ranks under the strategies of cpu_steps/strategies.py and as the planner would choose by
itself; strategies that come to the same program are run once. Steps of all are run in turns, so that a slow spell of
the machine meets all of them; the table has their medians with the middle half of the runs, and what the busiest rank
used of its core: where that is far below the wall clock, others had the machine and the comparison says little.
Exit code 5 where a rank correlation is below --least-spearman, or where the strategy predicted to be the fastest is
slower than the fastest measured by more than its spread and by more than 5%.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_steps.steps import Measured, measure_steps
from cpu_steps.strategies import CASES, RANKS, SAMPLE_MODELS, Case, Job, planned_jobs

CHECK_FAILED = 5
CLOSE_FRACTION = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model: strategies with their plans and measured steps."""

    model: str
    jobs: tuple[Job, ...]
    measured: tuple[Measured, ...]

    @property
    def predicted(self) -> list[float]:
        return [job.planned.plan.step_seconds for job in self.jobs]

    @property
    def spearman(self) -> float:
        """Rank correlation of predicted and median measured seconds."""
        return statistics.correlation(_ranks(self.predicted), _ranks([m.median for m in self.measured]))

    @property
    def top(self) -> int:
        """What the planner takes: the strategy of the lowest prediction."""
        return min(range(len(self.jobs)), key=lambda index: self.predicted[index])

    @property
    def fastest(self) -> int:
        return min(range(len(self.jobs)), key=lambda index: self.measured[index].median)

    @property
    def top_is_fast(self) -> bool:
        """Whether the top choice lies within the spread of the fastest, or within 5% of it."""
        best, top = self.measured[self.fastest], self.measured[self.top]
        return top.spread[0] <= best.spread[1] or top.median <= (1 + CLOSE_FRACTION) * best.median

    @property
    def mean_error(self) -> float:
        """Mean absolute error of the predictions, as a fraction."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return statistics.fmean(abs(predicted / measured.median - 1) for predicted, measured in pairs)


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal ones share the mean of their places."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def _inputs(case: Case, job: Job, path: str) -> None:
    """Save one whole batch by input name, and along which dim it is split."""
    import torch

    spec = importlib.util.spec_from_file_location(case.model, SAMPLE_MODELS / f"{case.model}.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[case.model] = module
    spec.loader.exec_module(module)
    known = inspect.signature(module.example_inputs).parameters
    arguments = {name: value for name, value in case.arguments.items() if name in known}
    torch.manual_seed(0)
    batch = module.example_inputs(batch_size=case.batch_size, **arguments)
    inputs = job.planned.graph.inputs
    named = dict(zip([value.name for value in inputs], batch, strict=True))
    torch.save((named, {value.name: value.batch_dim for value in inputs}), path)


def _program(package: Path) -> str:
    """The emitted code without the comments that say what was planned."""
    tree = ast.parse((package / "sharded_model.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


def compare(case: Case, cluster: str, rounds: int) -> Compared:
    """Plan, emit and run every strategy of a model."""
    from autopar.compiler.package import emit_package

    jobs = planned_jobs(case, cluster)
    with tempfile.TemporaryDirectory(prefix="autopar-steps-") as folder:
        packages = [os.path.join(folder, f"package{index}") for index in range(len(jobs))]
        programs: dict[str, int] = {}
        for index, (job, package) in enumerate(zip(jobs, packages, strict=True)):
            emit_package(job.planned.plan, job.planned.graph, Path(package), force=False)
            programs.setdefault(_program(Path(package)), index)
        jobs = tuple(jobs[index] for index in programs.values())
        packages = [packages[index] for index in programs.values()]
        inputs = os.path.join(folder, "inputs.pt")
        _inputs(case, jobs[0], inputs)
        measured = measure_steps(packages, inputs, folder, ranks=RANKS, rounds=rounds)
    return Compared(model=case.model, jobs=jobs, measured=tuple(measured))


def _lines(found: Compared) -> list[str]:
    lines = [f"{found.model}: milliseconds a step", _row("strategy", "predicted", "measured", "spread", "processor")]
    for index in sorted(range(len(found.jobs)), key=lambda i: found.measured[i].median):
        measured = found.measured[index]
        low, high = measured.spread
        lines.append(
            _row(
                found.jobs[index].name,
                f"{1e3 * found.predicted[index]:.1f}",
                f"{1e3 * measured.median:.1f}",
                f"{1e3 * low:.1f}..{1e3 * high:.1f}",
                f"{1e3 * measured.processor_seconds:.1f}",
            )
        )
    verdict = "is" if found.top_is_fast else "is NOT"
    lines.append(
        f"Spearman {found.spearman:.3f}, mean error {100 * found.mean_error:.0f}%; top choice "
        f"({found.jobs[found.top].name}) {verdict} as fast as the fastest ({found.jobs[found.fastest].name})"
    )
    return lines


def _row(name: str, predicted: str, measured: str, spread: str, processor: str) -> str:
    return f"  {name:34}{predicted:>10}{measured:>10}{spread:>18}{processor:>11}"


def _data(found: Compared) -> dict[str, object]:
    return {
        "model": found.model,
        "spearman": found.spearman,
        "mean_error": found.mean_error,
        "top": found.jobs[found.top].name,
        "fastest": found.jobs[found.fastest].name,
        "top_is_fast": found.top_is_fast,
        "strategies": [
            {
                "name": job.name,
                "predicted_seconds": job.planned.plan.step_seconds,
                "breakdown_seconds": dict(job.planned.plan.time_breakdown_seconds),
                "measured_seconds": list(measured.seconds),
                "median_seconds": measured.median,
                "processor_seconds": measured.processor_seconds,
            }
            for job, measured in zip(found.jobs, found.measured, strict=True)
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each strategy")
    parser.add_argument("--cluster", default="", help="a cluster file; without it this machine is profiled first")
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--least-spearman", type=float, default=0.9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [case.model for case in CASES]
    if unknown := set(names) - {case.model for case in CASES}:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        cluster = options.cluster or _profiled(os.path.join(folder, "measured.toml"))
        found = []
        for case in CASES:
            if case.model in names:
                found.append(compare(case, cluster, options.rounds))
                print("\n".join(_lines(found[-1])), file=sys.stderr if options.json else sys.stdout, flush=True)
    seconds = time.monotonic() - begin
    if options.json:
        print(json.dumps({"schema_version": 1, "seconds": seconds, "models": list(map(_data, found))}, indent=2))
    else:
        print(f"{seconds:.0f} seconds, load average {os.getloadavg()[0]:.1f}")
    good = all(model.spearman >= options.least_spearman and model.top_is_fast for model in found)
    return 0 if good else CHECK_FAILED


def _profiled(path: str) -> str:
    from autopar.compiler.profile import profile_machine

    profiled = profile_machine(ranks=RANKS, device="cpu")
    Path(path).write_text(profiled.document.text(), encoding="utf-8")
    return path


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
