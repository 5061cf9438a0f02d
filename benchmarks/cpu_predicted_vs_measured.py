"""Predicted against measured step seconds of sample models on two CPU ranks, over many strategies each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))

from cpu_steps.steps import Measured, measure_steps  # noqa: E402
from cpu_steps.strategies import CASES, RANKS, SAMPLE_MODELS, Case, Job, planned_jobs  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--cluster", default="cpu-local")
    parser.add_argument("--only", default="")
    parser.add_argument("--save", default="")
    options = parser.parse_args()
    from autopar.compiler.package import emit_package

    for case in CASES:
        if options.only and case.model not in options.only.split(","):
            continue
        jobs = planned_jobs(case, options.cluster)
        with tempfile.TemporaryDirectory() as folder:
            packages = []
            for index, job in enumerate(jobs):
                package = Path(folder, f"package{index}")
                emit_package(job.planned.plan, job.planned.graph, package, force=False)
                packages.append(str(package))
            import torch, importlib.util

            spec = importlib.util.spec_from_file_location(case.model, SAMPLE_MODELS / f"{case.model}.py")
            module = importlib.util.module_from_spec(spec)
            sys.modules[case.model] = module
            spec.loader.exec_module(module)
            import inspect

            args = {k: v for k, v in case.arguments.items() if k in inspect.signature(module.example_inputs).parameters}
            graph = jobs[0].planned.graph
            values = dict(
                zip([v.name for v in graph.inputs], module.example_inputs(case.batch_size, **args), strict=True)
            )
            inputs = os.path.join(folder, "inputs.pt")
            torch.save((values, {v.name: v.batch_dim for v in graph.inputs}), inputs)
            measured = measure_steps(packages, inputs, folder, ranks=RANKS, rounds=options.rounds)
        print(case.model)
        for job, m in sorted(zip(jobs, measured), key=lambda p: p[1].median):
            print(
                f"  {job.strategy.name:28} predicted {job.planned.plan.step_seconds * 1e3:8.1f}  measured {m.median * 1e3:8.1f}  [{m.spread[0] * 1e3:.1f} {m.spread[1] * 1e3:.1f}] min {min(m.seconds) * 1e3:.1f}",
                {k: round(v * 1e3, 1) for k, v in job.planned.plan.time_breakdown_seconds.items()},
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
