"""How long capturing Llama takes, as a multiple of `import torch` in the same run: cold processes, medians.

    python benchmarks/capture_speed.py [--runs 3] [--limit 2] [--growth-limit 0.2] [--exact] [--json]

Rows: 8B (32 layers), 405B (126 layers), 405B with twice the layers; with --exact also 8B by torch.export alone. Exits
with 5 where 405B takes more than the limit, or twice the layers more than the growth limit, in CPU seconds (wall time
also counts what else the machine does).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
from plan_speed import CHECK_FAILED, ROOT, measure

IMPORT, EIGHT, LARGE, DOUBLED = "import torch", "8B", "405B", "405B, twice the layers"
CAPTURE = "from autopar.planner.capture import capture_model; capture_model({path!r}, arguments={arguments!r}{more})"


def command(*, more: str = "", **arguments: object) -> list[str]:
    """A cold process that captures the sample Llama."""
    path = str(ROOT / "sample_models" / "llama.py")
    return [sys.executable, "-c", CAPTURE.format(path=path, arguments=arguments, more=more)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--limit", type=float, default=2.0, help="largest ratio of 405B that passes")
    parser.add_argument(
        "--growth-limit", type=float, default=0.2, help="largest growth by twice the layers that passes"
    )
    parser.add_argument("--exact", action="store_true", help="also 8B by torch.export alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    commands = {
        IMPORT: [sys.executable, "-c", "import torch"],
        EIGHT: command(preset="8b"),
        LARGE: command(preset="405b"),
        DOUBLED: command(preset="405b", num_layers=252),
    }
    if options.exact:
        commands["8B, torch.export"] = command(preset="8b", more=", is_exact=True")
    timings = measure(commands, options.runs)
    base = timings[IMPORT]
    ratios = {name: timing.median_cpu_seconds / base.median_cpu_seconds for name, timing in timings.items()}
    growth = ratios[DOUBLED] / ratios[LARGE] - 1
    if options.json:
        rows = [{**asdict(timing), "cpu_ratio": ratios[name]} for name, timing in timings.items()]
        print(json.dumps({"timings": rows, "growth_fraction": growth}, indent=2))
    else:
        print(f"{'':24} {'wall s':>8} {'x import':>9} {'CPU s':>8} {'x import':>9}")
        for name, timing in timings.items():
            wall_ratio = timing.median_wall_seconds / base.median_wall_seconds
            print(
                f"{name:24} {timing.median_wall_seconds:8.2f} {wall_ratio:9.2f} {timing.median_cpu_seconds:8.2f} "
                f"{ratios[name]:9.2f}"
            )
        print(f"twice the layers: {growth:+.0%}, limit {options.growth_limit:+.0%}; 405B limit {options.limit:g}")
    passes = ratios[LARGE] <= options.limit and growth <= options.growth_limit
    return 0 if passes else CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
