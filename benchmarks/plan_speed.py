"""How long `autopar plan` takes: cold processes, medians, as multiples of `import torch` in the same run.

    python benchmarks/plan_speed.py [--runs 5] [--only NAME ...] [--json]
    python benchmarks/plan_speed.py --limit 5 -- MODEL.py --gpus 8 ...

The table has wall and CPU seconds, the largest resident set, and the multiple; rows named after another one have twice
its layers or GPUs, and how much longer they take. Exits with 5 where a row is above its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ROOT / "sample_models"
CHECK_FAILED = 5
_DOUBLED_LIMIT = 1.2  # of a row with twice the layers or GPUs, over the row that it doubles
_BASE = "import torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command of the table. `limit`: the largest multiple of `import torch` that passes; `doubles`: another row."""

    name: str
    plan: tuple[str, ...]
    limit: float | None = None
    gib_limit: float | None = None
    doubles: str = ""


def _llama(preset: str, gpus: int, batch_size: int, *more: str) -> tuple[str, ...]:
    sizes = ("--gpus", str(gpus), "--batch-size", str(batch_size), "--precision", "bf16")
    return (str(MODELS / "llama.py"), "--set", f"preset={preset}", *sizes, *more)


_8B, _405B, _HALF = "llama 8b, 8 H100", "llama 405b, 16,384 H100", "llama 405b, 8,192 H100"
_MOE = ("--set", "preset=8x7b", "--gpus", "64", "--batch-size", "256", "--precision", "bf16")
_DEEPER_405B = _llama("405b", 16384, 2048, "--set", "num_layers=252")
_CASES = (
    Case(name="gpt tiny, 8 H100", plan=(str(MODELS / "gpt.py"), "--gpus", "8"), limit=5.0),
    Case(name=_8B, plan=_llama("8b", 8, 64), limit=4.0),
    Case(name="llama 8b, 64 layers", plan=_llama("8b", 8, 64, "--set", "num_layers=64"), doubles=_8B),
    Case(name="llama 8b, 16 H100", plan=_llama("8b", 16, 64), doubles=_8B),
    Case(name=_HALF, plan=_llama("405b", 8192, 2048)),
    Case(name=_405B, plan=_llama("405b", 16384, 2048), limit=10.0, gib_limit=4.0, doubles=_HALF),
    Case(name="llama 405b, 252 layers", plan=_DEEPER_405B, doubles=_405B),
    Case(name="moe 8x7b, 64 H100", plan=(str(MODELS / "moe.py"), *_MOE)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Medians of one command over cold runs; `wall_seconds` holds every run."""

    name: str
    wall_seconds: tuple[float, ...]
    median_wall_seconds: float
    median_cpu_seconds: float
    peak_bytes: int


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, Timing]:
    """Run the commands in turns, so that a slow spell of the machine meets all of them."""
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in commands}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(runs):
        for name, command in commands.items():
            with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
                begin = time.perf_counter()
                child = subprocess.Popen(
                    command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors
                )  # fmt: skip
                _, status, usage = os.wait4(child.pid, 0)
                wall = time.perf_counter() - begin
                child.returncode = os.waitstatus_to_exitcode(status)
                if child.returncode:
                    errors.seek(0)
                    sys.exit(f"{' '.join(command)} failed:\n{errors.read().decode()}")
            found[name].append((wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))
    return {
        name: Timing(
            name=name,
            wall_seconds=tuple(wall for wall, _, _ in times),
            median_wall_seconds=statistics.median(wall for wall, _, _ in times),
            median_cpu_seconds=statistics.median(cpu for _, cpu, _ in times),
            peak_bytes=max(peak for _, _, peak in times),
        )
        for name, times in found.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table. `multiple`: wall seconds over `import torch`; `over_doubled`: over the row it doubles."""

    case: Case
    timing: Timing
    multiple: float
    over_doubled: float | None

    @property
    def passes(self) -> bool:
        return (
            (self.case.limit is None or self.multiple <= self.case.limit)
            and (self.case.gib_limit is None or self.timing.peak_bytes <= self.case.gib_limit * 2**30)
            and (self.over_doubled is None or self.over_doubled <= _DOUBLED_LIMIT)
        )

    @property
    def text(self) -> str:
        timing, notes = self.timing, []
        if self.case.limit is not None:
            notes.append(f"limit {self.case.limit:g}x")
        if self.over_doubled is not None:
            notes.append(f"{self.over_doubled:.2f} of {self.case.doubles}, limit {_DOUBLED_LIMIT:g}")
        return (
            f"{self.case.name:24} {timing.median_wall_seconds:8.2f} {timing.median_cpu_seconds:8.2f}"
            f" {timing.peak_bytes / 2**30:8.2f} {self.multiple:8.2f}  {'; '.join(notes)}"
        )


def rows(cases: Sequence[Case], timings: dict[str, Timing]) -> list[Row]:
    """The table."""
    base = timings[_BASE].median_wall_seconds
    found: list[Row] = []
    for case in cases:
        timing, doubled = timings[case.name], timings.get(case.doubles)
        over = None if doubled is None else timing.median_wall_seconds / doubled.median_wall_seconds
        multiple = timing.median_wall_seconds / base
        found.append(Row(case=case, timing=timing, multiple=multiple, over_doubled=over))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=(), help="rows whose name has one of these")
    parser.add_argument("--limit", type=float, default=5.0, help="largest multiple that passes, of a plan after --")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("plan", nargs="*", help="arguments of `autopar plan`, after --")
    options = parser.parse_args()
    cases = _CASES
    if options.plan:
        cases = (Case(name="autopar plan", plan=tuple(options.plan), limit=options.limit),)
    elif options.only:
        cases = tuple(case for case in _CASES if any(part in case.name for part in options.only))
    commands = {_BASE: [sys.executable, "-c", "import torch"]}
    for case in cases:
        commands[case.name] = [sys.executable, "-m", "autopar.cli.main", "plan", *case.plan, "--quiet", "--json"]
    timings = measure(commands, options.runs)
    table = rows(cases, timings)
    if options.json:
        print(json.dumps({"timings": [asdict(timing) for timing in timings.values()],
                          "multiples": {row.case.name: row.multiple for row in table}}, indent=2))  # fmt: skip
    else:
        base = timings[_BASE]
        print(f"{'':24} {'wall s':>8} {'CPU s':>8} {'GiB':>8} {'multiple':>8}")
        print(f"{_BASE:24} {base.median_wall_seconds:8.2f} {base.median_cpu_seconds:8.2f}"
              f" {base.peak_bytes / 2**30:8.2f} {1.0:8.2f}")  # fmt: skip
        for row in table:
            print(row.text)
    return 0 if all(row.passes for row in table) else CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
