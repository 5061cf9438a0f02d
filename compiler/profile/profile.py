"""The whole way: forks ranks phase by phase, fits what they measured, and returns the cluster file."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from ...planner.errors import AutoparError
from ..verify.ranks import run_ranks
from .document import Document, describe
from .measurements import CPU_DTYPES, CUDA_DTYPES, Measurements, RankJob, measure_phase, num_gpus
from .messages import group_sizes

DEVICES = ("cpu", "cuda")
_CPU_RANKS = 2
_PHASE_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """What was measured, and the cluster file that says so."""

    measurements: Measurements
    document: Document


def profile_machine(
    *,
    ranks: int | None = None,
    device: str | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Profiled:
    """Measure this machine. `ranks`: 2 on a CPU, all GPUs where there are some. `progress`: phases done, all, the next.

    Raises:
        AutoparError: a device or number of ranks that the machine does not have, or a rank that failed.
    """
    gpus = num_gpus()
    device = device or ("cuda" if gpus else "cpu")
    if device not in DEVICES:
        raise AutoparError(f"there is no device {device!r}", fix=f"choose one of: {', '.join(DEVICES)}")
    if device == "cuda" and not gpus:
        raise AutoparError("this machine has no GPU that PyTorch and NCCL can use", fix="choose --device cpu")
    ranks = ranks if ranks is not None else (gpus if device == "cuda" else _CPU_RANKS)
    if ranks < 1 or (device == "cuda" and ranks > gpus):
        have = f"this machine has {gpus} GPUs" if device == "cuda" else "a rank is a process"
        raise AutoparError(f"{ranks} ranks are asked for; {have}", fix="give another --ranks")
    found = _measure(device, ranks, progress or (lambda done, total, phase: None))
    source = (
        f"measured on {found.device_name}, {ranks} {'rank' if ranks == 1 else 'ranks'} "
        f"({'NCCL' if device == 'cuda' else 'gloo'}), torch {version('torch')}, {datetime.date.today().isoformat()}"
    )
    return Profiled(measurements=found, document=describe(found, source=source))


def _measure(device: str, ranks: int, progress: Callable[[int, int, str], None]) -> Measurements:
    dtypes = CPU_DTYPES if device == "cpu" else CUDA_DTYPES
    sizes = group_sizes(ranks) if ranks > 1 else ()
    plan: list[tuple[str, str | int | None]] = [("device", None), ("memory", None), ("launches", None)]
    plan += [("products", dtype) for dtype in dtypes]
    plan += [(phase, None) for phase in ("sustained rate", "memory bandwidth", "functions", "attention", "machinery")]
    plan += [("collectives", size) for size in sizes]
    plan += [("overlap", None)] if ranks > 1 else []
    answers: dict[tuple[str, str | int | None], Any] = {}
    for done, (phase, argument) in enumerate(plan):
        progress(done, len(plan), phase if argument is None else f"{phase}, {argument}")
        answers[phase, argument] = _run(device, ranks, phase, argument)
    progress(len(plan), len(plan), "done")
    name, sm_count = answers["device", None]
    return Measurements(
        device=device,
        device_name=name,
        ranks=ranks,
        sm_count=sm_count,
        memory=answers["memory", None],
        products={dtype: answers["products", dtype] for dtype in dtypes},
        sustained_fraction=answers["sustained rate", None],
        streaming=answers["memory bandwidth", None],
        transcendental_seconds=answers["functions", None],
        attention=answers["attention", None],
        launches=answers["launches", None],
        machinery=answers["machinery", None],
        messages=tuple(time for size in sizes for time in answers["collectives", size]),
        hidden_fraction=answers["overlap", None] if ranks > 1 else None,
    )


def _run(device: str, ranks: int, phase: str, argument: str | int | None) -> object:
    """What rank 0 measured; the others did the same at the same time."""
    with tempfile.TemporaryDirectory(prefix="autopar-profile-") as folder:
        jobs = [
            RankJob(
                rank=rank,
                ranks=ranks,
                device=device,
                store=os.path.join(folder, "store"),
                phase=phase,
                argument=argument,
                timeout_seconds=_PHASE_TIMEOUT_SECONDS,
            )
            for rank in range(ranks)
        ]
        answers, failure = run_ranks(measure_phase, [(job,) for job in jobs], timeout_seconds=_PHASE_TIMEOUT_SECONDS)
    if failure is not None:
        raise AutoparError(
            f"measuring {phase} failed on rank {failure.rank}: {failure.error}",
            where=failure.traceback.strip().splitlines()[-1] if failure.traceback else "",
            fix="try again on a quieter machine, or with fewer --ranks",
        )
    return answers[0]
