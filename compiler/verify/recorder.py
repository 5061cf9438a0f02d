"""Records the collectives that a rank runs, by dispatch on c10d operations: process group, operation and payload.

The backward of a CPU rank runs in the calling thread, so one dispatch mode sees it, FSDP2's hooks and pipeline
schedules included. (torch's own CommDebugMode hooks modules as well and fails around pipeline schedules.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.bias import CausalBias
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# overload packet -> (name in a plan, position of the argument that is the payload)
_OPS = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
}
_FUNCTIONAL_GATHER = "_c10d_functional::all_gather_into_tensor"
_NO_COLLECTIVE = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}

# (global ranks of the group, operation, payload bytes) -> count
Recorded = Counter[tuple[tuple[int, ...], str, int]]


class CollectiveRecorder(TorchDispatchMode):
    """Counts collectives while active. `widened`: float64 payloads count as the float32 of the graph."""

    def __init__(self, *, widened: bool) -> None:
        super().__init__()
        self.widened = widened
        self.recorded: Recorded = Counter()

    def __enter__(self) -> CollectiveRecorder:
        # torch 2.13 cannot make a tensor subclass that has no constructor of its own under a dispatch mode.
        CausalBias.__new__ = _new_without_modes  # pyright: ignore[reportAttributeAccessIssue]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del CausalBias.__new__

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in _NO_COLLECTIVE:
            return
        if name == _FUNCTIONAL_GATHER:
            op, payload = "all_gather", self._bytes(args[0]) * args[1]
        elif name in _OPS:
            op, position = _OPS[name]
            payload = self._bytes(args[position])
        else:
            # Whatever it is, no plan lists it, so it shows up as a mismatch.
            op, payload = name, sum(self._bytes(arg) for arg in args)
        self.recorded[_ranks(args), op, payload] += 1

    def _bytes(self, payload: Any) -> int:
        return sum(
            tensor.numel() * (4 if self.widened and tensor.dtype == torch.float64 else tensor.element_size())
            for tensor in _tensors(payload)
        )


def _new_without_modes(cls: type[torch.Tensor], *arguments: Any, **keywords: Any) -> torch.Tensor:
    with _disable_current_modes():
        return torch.Tensor.__new__(cls)


def _tensors(payload: Any) -> Iterator[torch.Tensor]:
    if isinstance(payload, torch.Tensor):
        yield payload
    elif isinstance(payload, (list, tuple)):
        for item in payload:
            yield from _tensors(item)


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Global ranks of the process group among the arguments: an object, or for functional operations its name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arg)))
    names = [arg for arg in args if isinstance(arg, str)]
    if names:
        group = torch._C._distributed_c10d._resolve_process_group(names[-1])  # pyright: ignore[reportAttributeAccessIssue]
        return tuple(dist.get_process_group_ranks(group))
    return ()
