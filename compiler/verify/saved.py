"""What autograd keeps of one microbatch and what a step leaves behind, counted on the ranks of an emitted package.

Saved tensors are seen by `torch.autograd.graph.saved_tensors_hooks` around the forward of a stage. Their memory counts
once per storage, and neither parameters nor what the microbatch was given (model inputs and what follows from them).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ...cost_models.errors import AutoparError
from ...planner.capture.graph import ModelGraph
from ...planner.plan import Plan
from ...planner.schedules import Alive, kept_at_once
from .rank import imported, share
from .ranks import run_ranks
from .reference import Reference, run_reference

_DTYPE = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedJob:
    """What a rank needs to know; as in `RankJob`."""

    rank: int
    world_size: int
    package: str
    reference: str
    store: str
    batch_dims: Mapping[str, int | None]
    shares: tuple[int, ...]
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Bytes on one rank: kept by one microbatch's forward, `remade` with what its backward has made again and keeps for
    its second part (W), and held as parts of tensors after a step of AdamW.

    `saved_tensors` describes what was kept, "float32 (4, 64)" -> bytes, for people. `optimizer` counts the two moments.
    """

    saved: int
    remade: int
    parameters: int
    gradients: int
    optimizer: int
    saved_tensors: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Predicted and counted bytes of one stage on its fullest rank, by component: "activations" (of one microbatch; the
    mean where some are between the two parts of their backward), "parameters", "gradients", "optimizer"."""

    stage: int
    predicted: Mapping[str, int]
    counted: Mapping[str, int]

    @property
    def is_equal(self) -> bool:
        return self.predicted == self.counted


def compare_bytes(plan: Plan, package: Path, graph: ModelGraph, *, timeout_seconds: float = 300.0) -> list[StageBytes]:
    """What the plan says that a stage keeps, and what its ranks keep. The plan is one for CPU ranks in float32.

    Raises:
        AutoparError: as `measure_bytes`.
    """
    if plan.stages_per_rank > 1:
        raise AutoparError(
            f"bytes are counted by stage, and ranks hold {plan.stages_per_rank}",
            fix="count a plan with one stage per rank",
        )
    measured = measure_bytes(plan, package, graph, timeout_seconds=timeout_seconds)
    ranks = prod(plan.mesh.values()) // len(plan.stages)
    found = []
    for index, stage in enumerate(plan.stages):
        mine = measured[index * ranks : (index + 1) * ranks]
        states = kept_at_once(plan.schedule, len(plan.stages), max(plan.batch_shares, default=plan.microbatches))
        alive = [each for (each,) in states[index]]
        kept = alive[0].total

        def activations(rank: RankBytes, alive: list[Alive] = alive) -> int:
            return max(each.untouched * rank.saved + each.halfway * rank.remade for each in alive)

        states = ("parameters", "gradients", "optimizer")
        found.append(
            StageBytes(
                stage=index,
                predicted={
                    "activations": round(stage.memory_bytes["activations"] / kept),
                    **{name: stage.memory_bytes[name] for name in states},
                },
                counted={
                    "activations": round(max(map(activations, mine)) / kept),
                    **{name: max(getattr(rank, name) for rank in mine) for name in states},
                },
            )
        )
    return found


def measure_bytes(plan: Plan, package: Path, graph: ModelGraph, *, timeout_seconds: float = 300.0) -> list[RankBytes]:
    """Run one step of a package on gloo ranks in float32; what each rank, in order, keeps.

    Raises:
        AutoparError: the module or a rank stops.
    """
    world_size = prod(plan.mesh.values())
    with tempfile.TemporaryDirectory(prefix="autopar-saved-") as folder:
        reference = os.path.join(folder, "reference.pt")
        made = (plan.model, os.path.abspath(plan.model.path), plan.batch_size, _DTYPE, reference)
        _, failure = run_ranks(run_reference, [made], timeout_seconds=timeout_seconds)
        if failure is None:
            jobs = [
                SavedJob(
                    rank=rank,
                    world_size=world_size,
                    package=str(package.resolve()),
                    reference=reference,
                    store=os.path.join(folder, "store"),
                    batch_dims={value.name: value.batch_dim for value in graph.inputs},
                    shares=plan.batch_shares,
                    timeout_seconds=timeout_seconds,
                )
                for rank in range(world_size)
            ]
            answers, failure = run_ranks(_measure, [(job,) for job in jobs], timeout_seconds=timeout_seconds)
            if failure is None:
                return [answer for answer in answers if isinstance(answer, RankBytes)]
    raise AutoparError(f"rank {failure.rank} stopped: {failure.error}", where=str(package))


def _measure(job: SavedJob) -> RankBytes:
    torch.set_num_threads(1)
    os.environ.setdefault("LOCAL_RANK", str(job.rank))
    wanted = Reference.load(Path(job.reference))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    try:
        with imported(Path(job.package)) as emitted:
            mesh = emitted.build_mesh("cpu")
            built = emitted.build_stage(mesh, torch.device("cpu"))
            stage = built[0] if isinstance(built, nn.ModuleList) else built
            stage.train()
            emitted.load_full_state_dict(stage, wanted.state)
            recorder = SavedRecorder(stage, emitted)
            emitted.train_step(built, mesh, share(wanted.inputs, job.batch_dims, mesh, job.shares), 0)
            trained = [parameter for parameter in stage.parameters() if parameter.grad is not None]
            optimizer = torch.optim.AdamW([{"params": trained}])
            optimizer.step()
            moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
            return RankBytes(
                saved=max(recorder.num_bytes, default=0),
                remade=max(recorder.num_remade_bytes, default=0),
                parameters=sum(map(_held_bytes, stage.parameters())),
                gradients=sum(_part_bytes(parameter.grad) for parameter in trained),
                optimizer=sum(map(_part_bytes, moments)),
                saved_tensors=tuple(recorder.largest),
            )
    finally:
        dist.destroy_process_group()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _held_bytes(tensor: Any) -> int:
    return _local(tensor.detach()).untyped_storage().nbytes()


def _part_bytes(tensor: Any) -> int:
    # FSDP2 cuts gradients out of one buffer for all of a module, so that their storages are no parts.
    return _local(tensor.detach()).nbytes


class SavedRecorder:
    """Records every forward of a stage: `num_bytes` by microbatch in order, `largest` the tensors of the largest.

    `emitted` is the module of the stage, whose selective checkpointing keeps results where no hook sees them, and whose
    `recomputed_once` keeps what it makes again.
    """

    def __init__(self, stage: nn.Module, emitted: Any = None) -> None:
        self.num_bytes: list[int] = []
        self._microbatches: list[_Microbatch] = []
        self.largest: list[tuple[str, int]] = []
        self._stage = stage
        self._forward = stage.forward
        stage.forward = self._run
        self._contexts: list[Any] = []
        if hasattr(emitted, "create_selective_checkpoint_contexts"):
            self._make_contexts = emitted.create_selective_checkpoint_contexts
            emitted.create_selective_checkpoint_contexts = self._recorded_contexts
        self._is_input = False
        if hasattr(emitted, "recomputed_once"):
            functions = emitted.recomputed_once.__globals__
            functions["_Saved"] = self._recorded_places(functions["_Saved"])
            functions["_Inputs"] = SimpleNamespace(apply=self._recorded_inputs(functions["_Inputs"].apply))

    @property
    def num_remade_bytes(self) -> list[int]:
        """By microbatch in order, when all has been made again, which what it was made from does not outlive."""
        return [sum(map(_storage_bytes, each.remade.values())) for each in self._microbatches]

    def _recorded_inputs(self, keep: Any) -> Any:
        def kept(*tensors: torch.Tensor) -> torch.Tensor:
            self._is_input = True
            leaf = keep(*tensors)
            self._is_input = False
            return leaf

        return kept

    def _recorded_places(self, place: Any) -> Any:
        recorder = self

        class Place(place):
            def __init__(self) -> None:
                super().__init__()
                self.microbatch = recorder._microbatches[-1]

            def __setattr__(self, name: str, value: Any) -> None:
                super().__setattr__(name, value)
                if name == "tensor":
                    recorder._note(self.microbatch, value)

        return Place

    def _note(self, microbatch: _Microbatch, tensor: torch.Tensor) -> None:
        key = _storage_of(tensor)
        # FSDP changes parameters from split to whole and back while the forward runs.
        if key not in microbatch.given and key not in _storages(self._stage.parameters()):
            microbatch.kept.setdefault(key, tensor)
            if not self._is_input:
                microbatch.remade.setdefault(key, tensor)

    def _recorded_contexts(self, kernels: Any) -> Any:
        contexts = self._make_contexts(kernels)
        self._contexts.append(contexts[0])
        return contexts

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        microbatch = _Microbatch(given=_storages(self._given()))
        self._microbatches.append(microbatch)

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._note(microbatch, tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._contexts.clear()
            result = self._forward(*args, **kwargs)
        for tensor in (tensor for context in self._contexts for tensor in _kept_results(context)):
            microbatch.kept.setdefault(_storage_of(tensor), tensor)
        sizes = [(_described(tensor), _storage_bytes(tensor)) for tensor in microbatch.kept.values()]
        self.num_bytes.append(sum(size for _, size in sizes))
        if self.num_bytes[-1] == max(self.num_bytes):
            self.largest = sizes
        return result

    def _given(self) -> list[torch.Tensor]:
        """What microbatches are made of, and buffers."""
        values = [value for values in self._stage.microbatches for value in values.values()]  # pyright: ignore
        return [*values, *self._stage.buffers()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    """One tensor of each storage that is kept, by `_storage_of`: from the forward on, and when all has been made again.
    `given`: storages that do not count."""

    given: set[int]
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    remade: dict[int, torch.Tensor] = field(default_factory=dict)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return _local(tensor).untyped_storage().nbytes()


def _storage_of(tensor: torch.Tensor) -> int:
    # The address of the storage object: memory is used again within a forward, a storage that is kept alive is not.
    return _local(tensor.detach()).untyped_storage()._cdata


def _storages(tensors: Any) -> set[int]:
    return {_storage_of(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor)}


def _kept_results(context: Any) -> list[torch.Tensor]:
    """The results that a block under selective checkpointing keeps (torch 2.13: by kernel, then in order)."""
    values = [value for calls in context.storage.values() for call in calls.values() for value in tree_leaves(call)]
    return [value.val for value in values if isinstance(getattr(value, "val", None), torch.Tensor)]


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
