"""Measured host costs of the emitted package: what PyTorch's own machinery takes beside the kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..units import GB, MICROSECOND
from .toml_file import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCosts:
    """Seconds of host work. Where the device is the host (a CPU) they add to its kernels.

    view, node: an operation without a kernel forward, and its node in the backward.
    conversion: a change of placement beside its collective and copies, forward and backward.
    parameter: reading a DTensor parameter's local part, and its gradient's way back.
    fsdp_group, fsdp_parameter: FSDP2's hooks beside their collectives, for a group and for each of its parameters.
    checkpoint: running one block again. action: one action of a pipeline schedule. step: what every step takes once.
    """

    view_forward_seconds: float = 0.0
    node_backward_seconds: float = 0.0
    conversion_forward_seconds: float = 0.0
    conversion_backward_seconds: float = 0.0
    parameter_forward_seconds: float = 0.0
    parameter_backward_seconds: float = 0.0
    fsdp_group_forward_seconds: float = 0.0
    fsdp_group_backward_seconds: float = 0.0
    fsdp_parameter_forward_seconds: float = 0.0
    fsdp_parameter_backward_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    action_seconds: float = 0.0
    step_seconds: float = 0.0


NO_HOST_COSTS = HostCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCosts:
    """Clipping or an optimizer's step: per tensor (plain, or a DTensor), and per byte of parameters."""

    tensor_seconds: float
    sharded_tensor_seconds: float
    bytes_per_second: float

    def seconds(self, num_bytes: float, *, num_tensors: int, sharded: bool) -> float:
        """Of `num_tensors` tensors with `num_bytes` together."""
        each = self.sharded_tensor_seconds if sharded else self.tensor_seconds
        return num_tensors * each + num_bytes / self.bytes_per_second


def parse_host(table: Table) -> HostCosts:
    """Host costs from keys such as `action_microseconds`; what is left out is 0.

    Raises:
        HardwareError: an unknown key or absurd number.
    """
    keys = {field.name: field.name.replace("_seconds", "_microseconds") for field in fields(HostCosts)}
    table.check_keys(keys.values())
    return HostCosts(
        **{
            name: table.number(key, is_low_ok=True) * MICROSECOND
            for name, key in keys.items()
            if table.has(key)
        }
    )  # fmt: skip


def parse_update(table: Table) -> UpdateCosts:
    """Costs of an optimizer or of clipping.

    Raises:
        HardwareError: a key is missing, unknown or absurd.
    """
    table.check_keys(("tensor_microseconds", "sharded_tensor_microseconds", "gb_per_second"))
    return UpdateCosts(
        tensor_seconds=table.number("tensor_microseconds", is_low_ok=True) * MICROSECOND,
        sharded_tensor_seconds=table.number("sharded_tensor_microseconds", is_low_ok=True) * MICROSECOND,
        bytes_per_second=table.number("gb_per_second") * GB,
    )
