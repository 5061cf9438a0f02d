"""Random legal configurations against the free plan of the same problem: none should be predicted faster.

    python benchmarks/random_configurations.py [--count 1000] [--seed 0] [--gpus 64] [--set preset=8b] [--json]

Draws meshes (with their microbatches), ZeRO stages and shard sizes, schedules, stages per rank and checkpointing, each
evenly from what is legal, as a user would pin them. Placements and cuts are chosen as the search chooses them for such
pins, and each configuration is priced as any plan is. Prints the fastest ones that fit, and exits with 5 where one
beats the free plan.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cost_models.stacks import load_stack
from autopar.cost_models.units import GIB, format_seconds
from autopar.planner.checkpointing import POLICIES, name_of
from autopar.planner.driver import PlanRequest, capture, check_request
from autopar.planner.errors import CannotLower
from autopar.planner.schedules import get_schedule, schedule_names
from autopar.planner.search.answer import Candidate, Setting, rank
from autopar.planner.search.candidates import possible_meshes
from autopar.planner.search.pins import Pins
from autopar.planner.search.policies import num_cuttable
from autopar.planner.search.sweep import _Sweep, search
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.program import Placements

MODELS = Path(__file__).parents[1] / "sample_models"
CHECK_FAILED = 5
EQUAL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Everything that can be pinned. `shards`: ranks of dp that ZeRO-2 and 3 split over."""

    mesh: Mesh
    schedule: str
    stages_per_rank: int
    zero: int
    shards: int
    activation_checkpoint: str

    @property
    def flags(self) -> str:
        """As options of `autopar plan`, but the microbatch size."""
        mesh = ",".join(f"{name}={size}" for name, size in self.mesh.written.items())
        within = f" --zero-shard-size {self.shards}" if self.shards < self.mesh.dp and self.zero >= 2 else ""
        stages = f" --stages-per-rank {self.stages_per_rank}" if self.stages_per_rank > 1 else ""
        return (
            f"--mesh {mesh} --zero {self.zero}{within} --schedule {self.schedule}{stages} "
            f"--activation-checkpoint {self.activation_checkpoint}"
        )


def drawn(meshes: Sequence[Mesh], pieces: int, seed: int) -> Iterator[Configuration]:
    """Legal configurations without end; the sizes of the axes evenly first, then their numbers of microbatches."""
    rng = random.Random(seed)
    by_sizes: dict[Mesh, list[Mesh]] = {}
    for mesh in meshes:
        by_sizes.setdefault(replace(mesh, microbatches=1), []).append(mesh)
    sizes = sorted(by_sizes, key=lambda mesh: tuple(mesh.sizes.values()))
    while True:
        mesh = rng.choice(by_sizes[rng.choice(sizes)])
        zero = rng.choice((0, 1, 2, 3)) if mesh.dp > 1 else 0
        shards = rng.choice([n for n in range(2, mesh.dp + 1) if mesh.dp % n == 0]) if zero >= 2 else mesh.dp
        checkpoint = rng.choice(POLICIES)
        pipelines = [
            (name, stages)
            for name in schedule_names()
            for stages in get_schedule(name).stages_per_rank
            if stages * mesh.pp <= pieces and not get_schedule(name).refuse(mesh.pp, stages, mesh.microbatches)
        ]
        if pipelines:
            schedule, stages = rng.choice(pipelines)
            yield Configuration(
                mesh=mesh, schedule=schedule, stages_per_rank=stages, zero=zero, shards=shards,
                activation_checkpoint=checkpoint,
            )  # fmt: skip


@dataclass
class Pinned:
    """Prices configurations as a search does that has all of this pinned; programs and prices are shared by all."""

    sweep: _Sweep

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        setting = self.sweep.setting
        return possible_meshes(self.sweep.space, self.sweep.batch, setting.gpus, setting.pins)[0]

    def price(self, configuration: Configuration) -> Candidate | None:
        """The fastest that fits of the mesh's own placements and those of other meshes; None without placements."""
        placer, mesh = self.sweep.placer, configuration.mesh
        solved = placer.solve(mesh, 0.0)
        tried = [] if isinstance(solved, str) else list(self._priced(configuration, solved))
        if not any(candidate.fits for candidate in tried):
            for labelling in placer.known(mesh):
                tried.extend(self._priced(configuration, placer.taken(mesh, labelling)))
        return min(tried, key=lambda candidate: (not candidate.fits, rank(candidate)), default=None)

    def _priced(self, configuration: Configuration, placements: Placements) -> Iterator[Candidate]:
        mesh = replace(configuration.mesh, replicas=configuration.mesh.dp // configuration.shards)
        pipeline = configuration.schedule, configuration.stages_per_rank
        try:
            pricer = self.sweep.pricer
            found = pricer.candidate(
                pricer.evaluator(mesh, placements), pipeline, configuration.zero, configuration.activation_checkpoint
            )
        except CannotLower:
            return  # the conversions of two axes do not go together
        if found is not None:
            yield found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="llama.py", help="of sample_models")
    parser.add_argument("--set", action="append", default=None, metavar="KEY=VALUE", help="default: preset=8b")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--cluster", default="h100-sxm")
    parser.add_argument("--top", type=int, default=10, help="rows that are printed")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    request = PlanRequest(
        model=str(MODELS / given.model), arguments=dict(item.split("=", 1) for item in given.set or ["preset=8b"]),
        gpus=given.gpus, cluster=given.cluster, batch_size=given.batch_size, precision="bf16",
    )  # fmt: skip
    cluster = check_request(request)
    graph, _ = capture(request)
    setting = Setting(
        graph=graph, gpus=given.gpus, cluster=cluster, stack=load_stack("eager"), precision="bf16",
        optimizer="adamw", pins=Pins(mesh={}),
    )  # fmt: skip
    begin = time.process_time()
    free = search(setting).best
    searched = time.process_time() - begin
    begin = time.process_time()
    pinned = Pinned(_Sweep(setting, lambda text: None))
    seen: dict[Configuration, Candidate | None] = {}
    for configuration in drawn(pinned.meshes, num_cuttable(graph), given.seed):
        if len(seen) == given.count:
            break
        if configuration not in seen:
            seen[configuration] = pinned.price(configuration)
    priced = time.process_time() - begin
    fitting = [(c, found) for c, found in seen.items() if found is not None and found.fits]
    fitting.sort(key=lambda item: item[1].cost.step_seconds)
    best = free.cost.step_seconds
    better = [item for item in fitting if item[1].cost.step_seconds < best * (1 - EQUAL)]
    if given.json:
        print(json.dumps({
            "count": len(seen), "fit": len(fitting), "free_step_seconds": best, "better": len(better),
            "search_cpu_seconds": round(searched, 2), "pricing_cpu_seconds": round(priced, 2),
            "best": [{"flags": c.flags, "step_seconds": f.cost.step_seconds} for c, f in fitting[: given.top]],
        }, indent=2))  # fmt: skip
        return CHECK_FAILED if better else 0
    print(f"free plan  {format_seconds(best)}  {_named(free)}  (searched in {searched:.1f} s of CPU)")
    refused = sum(found is None for found in seen.values())
    print(
        f"{len(seen)} random configurations (seed {given.seed}; {priced:.1f} s of CPU): {len(fitting)} fit, "
        f"{len(seen) - len(fitting) - refused} need too much memory, {refused} have no placements; "
        f"{len(better)} are faster than the free plan"
    )
    for configuration, found in fitting[: given.top]:
        over = found.cost.step_seconds / best - 1
        samples = given.batch_size // (configuration.mesh.dp * configuration.mesh.microbatches)
        memory = found.cost.memory_bytes / GIB
        print(
            f"  {over:+8.2%}  {format_seconds(found.cost.step_seconds):>9} {memory:6.1f} GiB  {configuration.flags} "
            f"--microbatch-size {samples}"
        )
    return CHECK_FAILED if better else 0


def _named(found: Candidate) -> str:
    mesh = ",".join(f"{name}={size}" for name, size in found.mesh.written.items())
    return (
        f"{mesh}, {found.mesh.microbatches} microbatches, {found.schedule}, zero={found.zero}, "
        f"checkpointing {name_of(found.activation_checkpoint)}"
    )


if __name__ == "__main__":
    sys.exit(main())
