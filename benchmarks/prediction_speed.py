"""How long predictions of pinned configurations take: GPT-3 175B, captured once, no integer program.

    python benchmarks/prediction_speed.py [--count 1000] [--limit-seconds 10] [--json]

Every configuration is another: tensor, pipeline and data parallel sizes, microbatch size, interleaving, ZeRO stage and
recomputation. They are drawn evenly from all that 96 blocks and the batch allow. Exits with 5 where all of them
together take longer than the limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from accuracy.models import Shape
from accuracy.predict import Predictor
from accuracy.setups import CannotExpress, Setup
from autopar.cost_models.hardware import load_cluster
from autopar.cost_models.stacks import load_stack

_BATCH, _LAYERS, _WIDTH = 1536, 96, 12288
_GPUS = 1536
_SHAPE = Shape(
    file="gpt.py",
    arguments=(("vocab_size", 51200), ("context", 2048), ("num_heads", 96), ("width", _WIDTH), ("hidden", 4 * _WIDTH),
               ("dropout", 0.1), ("bias", True)),
)  # fmt: skip
_CHECK_FAILED = 5


def configurations() -> Iterator[Setup]:
    """Everything that divides."""
    cluster, stack = load_cluster("a100-80g-sxm"), load_stack("eager")
    sizes = product((1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24), (4, 8, 16, 32, 64, 96, 128), (1, 2, 4))
    for tp, pp, dp, microbatch in sizes:
        if tp * pp * dp > _GPUS or _BATCH % (dp * microbatch) or _BATCH // (dp * microbatch) < pp:
            continue
        for interleave, zero, policy in product((1, 2), (0, 1, 2, 3), ("none", "attention", "full")):
            if _LAYERS % (pp * interleave) or (interleave > 1 and (pp == 1 or _BATCH // (dp * microbatch) % pp)):
                continue
            yield Setup(
                shape=_SHAPE, layers=_LAYERS, width=_WIDTH, cluster=cluster, stack=stack, precision="bf16",
                tp=tp, pp=pp, dp=dp, replicas=1, zero=zero, policy=policy, schedule="1f1b" if pp > 1 else "none",
                sequence_parallel=True, memory="computed", global_batch=_BATCH, microbatch_sizes=(microbatch,),
                interleaves=(interleave,), dealt="blocks",
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000, help="configurations")
    parser.add_argument("--limit-seconds", type=float, default=10.0, help="CPU time of all of them that passes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    every = list(configurations())
    chosen = [every[i * len(every) // given.count] for i in range(given.count)]
    predictor = Predictor()
    began = time.process_time()
    for tp in (1, 2, 4, 8):  # the capture, and the placements that a tensor parallel size pins
        predictor.predict(next(setup for setup in every if setup.tp == tp))
    before = time.process_time() - began
    predictor = predictor.pinned()
    wall, cpu = time.perf_counter(), time.process_time()
    refused, fitting = 0, 0
    for setup in chosen:
        try:
            fitting += predictor.predict(setup).fits
        except CannotExpress:
            refused += 1
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    found = {
        "configurations": len(chosen), "of": len(every), "refused": refused, "fit": fitting,
        "wall_seconds": round(wall, 3), "cpu_seconds": round(cpu, 3), "capture_cpu_seconds": round(before, 3),
        "limit_seconds": given.limit_seconds,
    }  # fmt: skip
    if given.json:
        print(json.dumps(found))
    else:
        print(
            f"{len(chosen)} of {len(every)} configurations of GPT-3 175B: {wall:.2f} s, CPU {cpu:.2f} s "
            f"(limit {given.limit_seconds:g}); {fitting} fit, {refused} refused; capture before: CPU {before:.2f} s"
        )
    return 0 if cpu <= given.limit_seconds and not refused else _CHECK_FAILED


if __name__ == "__main__":
    sys.exit(main())
