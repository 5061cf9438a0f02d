"""What PyTorch's own machinery takes on the host beside kernels and collectives, by what the emitted code does.

All numbers are of the profiled device (`HostCosts`); without a profile they are 0 and a launch per kernel remains.
"""

from __future__ import annotations

from ...cost_models.hardware import Gpu
from ...cost_models.work import Work
from ..capture.graph import Kind
from ..sharding.mesh import PARAMETER_AXES, Mesh
from ..sharding.program import Compute, TemplateProgram
from ..sharding.redistribute import Change
from .holdings import Holdings


def holds_dtensors(mesh: Mesh, zero: int) -> bool:
    """Whether parameters are DTensors to the optimizer: placed on an axis that may split them, or parts of ZeRO."""
    return _places_parameters(mesh) or (mesh.state_ranks > 1 and zero >= 1)


def _places_parameters(mesh: Mesh) -> bool:
    return any(mesh.sizes[axis] > 1 for axis in PARAMETER_AXES)


def operation_host(step: Compute, work: Work, gpu: Gpu) -> tuple[float, float]:
    """Forward and backward of an operation that launches no kernel there: a view, a node that hands gradients on."""
    ahead = gpu.host.view_forward_seconds if step.operands and not work.forward.kernels else 0.0
    has_gradient = any(value.requires_grad for value in step.outputs)
    back = gpu.host.node_backward_seconds if has_gradient and not work.backward.kernels else 0.0
    return ahead, back


def conversion_host(change: Change, gpu: Gpu) -> tuple[float, float]:
    """Forward and backward of a change of placement."""
    host = gpu.host
    return host.conversion_forward_seconds, host.conversion_backward_seconds if change.before.requires_grad else 0.0


def parameters_host(lowered: TemplateProgram, mesh: Mesh, gpu: Gpu) -> tuple[float, float]:
    """Forward and backward of reading a unit's parameters, in one microbatch: DTensors if an axis may split them."""
    nodes = [lowered.template.by_name[made.ref.node] for made in lowered.tensors]
    read = [node for node in nodes if node.kind is Kind.PARAMETER]
    trained = sum(node.output.requires_grad for node in read)
    if not _places_parameters(mesh):
        return 0.0, trained * gpu.host.node_backward_seconds
    return len(read) * gpu.host.parameter_forward_seconds, trained * gpu.host.parameter_backward_seconds


def fsdp_hooks(held: Holdings, gpu: Gpu) -> tuple[float, float]:
    """Forward and backward of FSDP2's hooks in one microbatch, beside collectives and copies."""
    host, groups, count = gpu.host, held.num_groups, held.num_parameters
    ahead = groups * host.fsdp_group_forward_seconds + count * host.fsdp_parameter_forward_seconds
    back = groups * host.fsdp_group_backward_seconds + count * host.fsdp_parameter_backward_seconds
    return ahead, back
