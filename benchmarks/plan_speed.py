"""How long `autopar plan` takes, as a multiple of `import torch` in the same run: cold processes, medians.

    python benchmarks/plan_speed.py [--runs 5] [--limit 5] [--json] [-- MODEL.py --gpus 8 ...]

Exits with 5 where the ratio is above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEFAULT_PLAN = (str(ROOT / "sample_models" / "gpt.py"), "--gpus", "8")
CHECK_FAILED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians of one command over cold runs; `wall_seconds` holds every run."""

    name: str
    wall_seconds: tuple[float, ...]
    median_wall_seconds: float
    median_cpu_seconds: float


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, Timing]:
    """Run the commands in turns, so that a slow spell of the machine meets all of them."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(runs):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder:
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                begin = time.perf_counter()
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
                wall = time.perf_counter() - begin
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
            if done.returncode:
                sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            found[name].append((wall, cpu))
    return {
        name: Timing(
            name=name,
            wall_seconds=tuple(wall for wall, _ in times),
            median_wall_seconds=statistics.median(wall for wall, _ in times),
            median_cpu_seconds=statistics.median(cpu for _, cpu in times),
        )
        for name, times in found.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--limit", type=float, default=5.0, help="largest ratio that passes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("plan", nargs="*", default=DEFAULT_PLAN, help="arguments of `autopar plan`, after --")
    options = parser.parse_args()
    plan = [sys.executable, "-m", "autopar.cli.main", "plan", *options.plan, "--quiet"]
    timings = measure({"import torch": [sys.executable, "-c", "import torch"], "autopar plan": plan}, options.runs)
    base, planned = timings["import torch"], timings["autopar plan"]
    ratio = planned.median_wall_seconds / base.median_wall_seconds
    if options.json:
        print(json.dumps({"timings": [asdict(t) for t in timings.values()], "ratio": ratio}, indent=2))
    else:
        for timing in timings.values():
            runs = " ".join(f"{wall:.2f}" for wall in timing.wall_seconds)
            print(
                f"{timing.name:14} median {timing.median_wall_seconds:6.2f} s, CPU {timing.median_cpu_seconds:6.2f} s"
                f"   runs: {runs}"
            )
        print(f"ratio {ratio:.2f}, limit {options.limit:g}")
    return 0 if ratio <= options.limit else CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
