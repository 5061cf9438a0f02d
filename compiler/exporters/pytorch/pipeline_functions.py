"""The emitted function that puts stages under a schedule of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ....planner.schedules import get_schedule
from ...text import layout

_FIRST_PARAMETER = """\
    parameter = next(stage.parameters())
    dtype, device = parameter.dtype, parameter.device"""
_FIRST_PARAMETER_IF_ANY = """\
    dtype = next((p.dtype for p in stage.parameters()), None)
    device = next((p.device for p in stage.parameters()), torch.device(mesh.device_type))"""
_PIPELINE = '''\
def pipeline(stage: nn.Module, mesh: DeviceMesh) -> SCHEDULE:
    """The stage in its schedule. One microbatch's tensors cross the edges between stages with these shapes."""
PARAMETER

    def tensor(*shape: int, dtype: torch.dtype | None = dtype, requires_grad: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

    edges = (
EDGES
    )
    index = mesh["pp"].get_local_rank()
    received, sent = edges[index]
    wrapped = PipelineStage(
        stage, index, PP, device, input_args=received, output_args=sent, group=mesh["pp"].get_group()
    )
    # The last stage returns the loss itself; it is a sum over microbatches, so gradients are not rescaled.
    return SCHEDULE(wrapped, MICROBATCHES, loss_fn=lambda loss, _: loss, scale_grads=False)'''


_PIPELINE_OF_SEVERAL = '''\
def pipeline(stages: nn.ModuleList, mesh: DeviceMesh) -> SCHEDULE:
    """This rank's stages in their schedule. One microbatch's tensors cross the stages' edges with these shapes."""
PARAMETER

    def tensor(*shape: int, dtype: torch.dtype | None = dtype, requires_grad: bool = True) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

    edges = (
EDGES
    )
    group = mesh["pp"].get_group()
    wrapped = []
    for index, stage in zip(RANK_STAGES[mesh["pp"].get_local_rank()], stages, strict=True):
        received, sent = edges[index]
        wrapped.append(
            PipelineStage(stage, index, len(edges), device, input_args=received, output_args=sent, group=group)
        )
    # The last stage returns the loss itself; it is a sum over microbatches, so gradients are not rescaled.
    return SCHEDULE(wrapped, MICROBATCHES, loss_fn=lambda loss, _: loss, scale_grads=False)'''


CONTIGUOUS_STAGE = '''\
class ContiguousStage(PipelineStage):
    """A stage whose gradients lie as messages take them: `autograd.grad` leaves them as they were made."""

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        gradients = self.bwd_cache.get(bwd_chunk_id, ())
        self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        return super().get_bwd_send_ops(bwd_chunk_id)'''

GATHERED_STAGE = '''\
class GatheredStage(ContiguousStage):
    """A stage that gathers its parameters before both parts of a backward.

    PyTorch makes gradients for the parameters that a stage has when a part begins. A forward leaves shards there.
    """

    def backward_one_chunk(self, *args, **kwargs) -> None:
        self.gather()
        super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs) -> None:
        self.gather()
        super().backward_weight_one_chunk(*args, **kwargs)

    def gather(self) -> None:
        """Gather what is not whole. The first stage runs its backward in one part, which gathers as it goes."""
        modules = [] if self.is_first else [m for m in self.submod.modules() if isinstance(m, FSDPModule)]
        for handle in [module.unshard(async_op=True) for module in modules]:
            handle.wait()'''


def pipeline(
    received: Sequence[str],
    sent: Sequence[str],
    *,
    schedule: str,
    has_parameters: bool,
    shares: bool,
    gathers: bool,
) -> str:
    """`received`, `sent`: by stage, the tensors on its edges as source. `has_parameters`: every stage has some.
    `shares`: dp ranks take different numbers of microbatches. `gathers`: each part of a backward gathers parameters."""
    parameter = _FIRST_PARAMETER if has_parameters else _FIRST_PARAMETER_IF_ANY
    text = _PIPELINE
    if get_schedule(schedule).is_multi_stage:
        text, parameter = _PIPELINE_OF_SEVERAL, parameter.replace("stage.", "stages.")
    text = text.replace("SCHEDULE", get_schedule(schedule).torch_class).replace("PARAMETER", parameter)
    text = text.replace("MICROBATCHES", "num_microbatches(mesh)") if shares else text
    if get_schedule(schedule).splits_backward:
        stage = "GatheredStage(" if gathers else "ContiguousStage("
        classes = (CONTIGUOUS_STAGE, GATHERED_STAGE) if gathers else (CONTIGUOUS_STAGE,)
        text = "\n\n\n".join((*classes, text.replace("PipelineStage(", stage)))
    return text.replace("EDGES", "\n".join(_edges(received, sent)))


def _edges(received: Sequence[str], sent: Sequence[str]) -> list[str]:
    """One line per run of stages whose edges are alike."""
    lines: list[str] = []
    index = 0
    for pair, run in groupby(f"({before}, {after})" for before, after in zip(received, sent, strict=True)):
        last = index + len(list(run)) - 1
        one = index == last
        note = f"stage {index}" if one else f"stages {index} to {last}"
        lines += layout(f"{pair}," if one else f"*[{pair}] * {last - index + 1},", "        ", note)
        index = last + 1
    return lines


__all__ = ["pipeline"]
