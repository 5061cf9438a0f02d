"""What one rank does in a verification: runs the emitted step, compares every value, records its collectives."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .draws import draws_fixed
from .dropout import dropout_off
from .recorder import CollectiveRecorder, Recorded
from .reference import CLIP_NORM, Reference, optimizers
from .report import ValueCheck

# A value that is small beside all of its kind may err by this part of them: some gradients are exactly zero.
FLOOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Everything a rank needs to know. `batch_dims`: model input -> its batch dim. `shares`: of the batch, by dp rank,
    as in `Mesh`."""

    rank: int
    world_size: int
    package: str
    reference: str
    store: str
    dtype: str
    tolerance: float
    batch_dims: Mapping[str, int | None]
    shares: tuple[int, ...]
    is_random: bool
    timeout_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """`names`: parameters and buffers that this rank's stage holds."""

    checks: tuple[ValueCheck, ...]
    names: frozenset[str]
    recorded: Recorded


def run_rank(job: RankJob) -> RankResult:
    """Join the group, verify, leave."""
    torch.set_num_threads(1)
    # Reading whole tensors warns that gathering two axes takes two steps; it is no part of what is verified.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    torch.set_default_dtype(getattr(torch, job.dtype))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    try:
        return _verify(job)
    finally:
        dist.destroy_process_group()


@contextmanager
def imported(package: Path) -> Iterator[Any]:
    """The emitted sharded_model; it imports its neighbours by their bare names."""
    sys.path.insert(0, str(package))
    try:
        yield importlib.import_module("sharded_model")
    finally:
        sys.path.remove(str(package))


def _verify(job: RankJob) -> RankResult:
    os.environ.setdefault("LOCAL_RANK", str(job.rank))
    wanted = Reference.load(Path(job.reference))
    with imported(Path(job.package)) as emitted:
        mesh = emitted.build_mesh("cpu")
        stage = emitted.build_stage(mesh, torch.device("cpu"))
        stage.train()
        optimized = emitted.optimized(stage) if hasattr(emitted, "optimized") else stage
        for part in _parts(stage):
            emitted.load_full_state_dict(part, wanted.state)
        inputs = share(wanted.inputs, job.batch_dims, mesh, job.shares)
        compare = _Comparison(job.rank, job.tolerance)
        start = _snapshot(optimized)
        with ExitStack() as chance:
            if job.is_random:
                chance.enter_context(dropout_off())
                chance.enter_context(draws_fixed())
            loss = emitted.train_step(stage, mesh, inputs, 0)
        compare.one("loss", "loss", loss, wanted.loss, floor=0.0)
        names: set[str] = set()
        for gradients in _gradients(emitted, stage, optimized):
            compare.all("gradient", _among(gradients, wanted.gradients), wanted.gradients, wanted.norm)
            names |= gradients.keys() & wanted.gradients.keys()
        for part in _parts(stage):
            state = emitted.full_state_dict(part)
            known = {name: state[name] for name, _ in part.named_buffers() if name in wanted.buffers}
            compare.all("buffer", known, wanted.buffers, None)
            names |= known.keys()
        for name, make in optimizers(wanted.norm).items():
            _restore(optimized, start)
            make([parameter for parameter in optimized.parameters() if parameter.requires_grad]).step()
            for part in _parts(stage):
                stepped = _among(emitted.full_state_dict(part), wanted.gradients)
                compare.all(name, stepped, wanted.stepped[name], None)
        _restore(optimized, start)
        for parameter in optimized.parameters():
            parameter.grad = None
        # The first step exchanged the pipeline's metadata, the second shows what every step does. Dropout stays on:
        # what it saves for the backward decides how far a recomputation goes.
        with CollectiveRecorder(widened=job.dtype == "float64") as recorder:
            loss = emitted.train_step(stage, mesh, inputs, 1)
            norm = emitted.clip_gradients(stage, mesh, CLIP_NORM)
        if not job.is_random:
            compare.one("loss", "loss of the second step", loss, wanted.loss, floor=0.0)
            rounding = abs(float(wanted.norm) - float(wanted.exact_norm))
            floor = rounding / job.tolerance  # no less exact than in one process
            compare.one("norm", "norm before clipping", torch.as_tensor(norm), wanted.exact_norm, floor=floor)
            scale = min(1.0, CLIP_NORM / (float(norm) + 1e-6))
            clipped = {name: gradient * scale for name, gradient in wanted.gradients.items()}
            for gradients in _gradients(emitted, stage, optimized):
                compare.all("clipped gradient", _among(gradients, clipped), clipped, wanted.norm * scale)
    return RankResult(
        checks=tuple(compare.checks),
        names=frozenset(names),
        recorded=recorder.recorded,
    )


def share(
    inputs: Mapping[str, torch.Tensor], batch_dims: Mapping[str, int | None], mesh: Any, shares: tuple[int, ...]
) -> dict[str, torch.Tensor]:
    """The samples of this rank's data-parallel share."""
    if "dp" not in mesh.mesh_dim_names:
        return dict(inputs)
    dp = mesh["dp"]
    counts = shares or (1,) * dp.size()

    def mine(value: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            return value
        samples = value.shape[dim] // sum(counts)
        return value.split([count * samples for count in counts], dim)[dp.get_local_rank()].contiguous()

    return {name: mine(value, batch_dims[name]) for name, value in inputs.items()}


def _parts(stage: nn.Module) -> list[nn.Module]:
    """The modules whose names are the user's: the stage, or the stages that the rank holds."""
    return list(stage) if isinstance(stage, nn.ModuleList) else [stage]


def _among(values: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if name in known}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _snapshot(stage: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(stage.named_parameters()), **dict(stage.named_buffers())}
    return {name: _local(tensor.detach()).clone() for name, tensor in tensors.items()}


def _restore(stage: nn.Module, saved: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in {**dict(stage.named_parameters()), **dict(stage.named_buffers())}.items():
            _local(tensor.detach()).copy_(saved[name])


def _gradients(emitted: Any, stage: nn.Module, optimized: nn.Module) -> list[dict[str, torch.Tensor]]:
    """The gradients in the user's shapes, by stage: put where the weights are, and read as a checkpoint would be."""
    saved = _snapshot(optimized)
    with torch.no_grad():
        for parameter in optimized.parameters():
            local = _local(parameter.detach())
            if parameter.grad is None:
                local.zero_()
            else:
                local.copy_(_local(parameter.grad.detach()))
    found = [
        {name: value.detach().clone() for name, value in emitted.full_state_dict(part).items()}
        for part in _parts(stage)
    ]
    _restore(optimized, saved)
    return found


class _Comparison:
    """Collects checks: |got - want| <= tolerance * (|want| + FLOOR * |all of its kind|), in norms."""

    def __init__(self, rank: int, tolerance: float) -> None:
        self.rank, self.tolerance = rank, tolerance
        self.checks: list[ValueCheck] = []

    def all(
        self, what: str, got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor], total: torch.Tensor | None
    ) -> None:
        if total is None:
            floats = [value for value in want.values() if value.is_floating_point()]
            total = torch.stack([value.norm() for value in floats]).norm() if floats else torch.zeros(())
        for name in sorted(got):
            self.one(what, name, got[name], want[name], floor=FLOOR * float(total))

    def one(self, what: str, name: str, got: torch.Tensor, want: torch.Tensor, *, floor: float) -> None:
        got = _local(got).detach()
        if got.is_complex():
            got, want = torch.view_as_real(got), torch.view_as_real(want)
        if got.shape != want.shape:
            error = f"{what} {name}: emitted shape {tuple(got.shape)}, the module's {tuple(want.shape)}"
            raise ValueError(error)
        allowed = float(want.double().norm()) + floor
        error_norm = float((got.double() - want.double()).norm())
        relative = error_norm / allowed if allowed > 0 else (0.0 if error_norm == 0 else float("inf"))
        self.checks.append(
            ValueCheck(what=what, name=name, rank=self.rank, relative=relative, ok=relative <= self.tolerance)
        )
