"""Everything private of PyTorch that recording needs, in one place. Where a name is missing, importing this module
fails, and the capture uses `torch.export` alone.

Used: `ProxyTorchDispatchMode` (the class that the PreDispatch key accepts as a mode), the PreDispatch mode stack of
`torch._ops`, `enable_python_dispatcher`, `torch.compiler`'s flags (a traced program asks `is_exporting()`), and
functorch's interpreter stack. At the PreDispatch key an operation is seen as the user's program calls it, before
autograd, autocast and decompositions: the level at which `torch.export` traces.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import DispatchKey, _TorchDispatchModeKey  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import _pop_mode_from_pre_dispatch, _set_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode


class PreDispatchMode(ProxyTorchDispatchMode):
    """A mode that sees every operation before autograd. Subclasses define `__torch_dispatch__`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to skip it torch would import it, which takes longer than a capture

    def __init__(self) -> None:
        # Not ProxyTorchDispatchMode's: it makes a tracer and imports the compiler.
        TorchDispatchMode.__init__(self, DispatchKey.PreDispatch)
        self._mode_key = _TorchDispatchModeKey.PROXY
        self.enter_stack: Any = deque()


@contextlib.contextmanager
def recording(mode: PreDispatchMode) -> Iterator[None]:
    """Let `mode` see the operations of this block."""
    with enable_python_dispatcher(), mode:
        yield


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """`torch.compiler.is_compiling()` and `is_exporting()` are true, and no backend is on, as under `torch.export`."""
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    backends: Any = (torch.backends.cudnn, torch.backends.mkldnn, torch.backends.nnpack)
    flags = [backend.set_flags(False) for backend in backends]
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before
        for backend, own in zip(backends, flags, strict=True):
            backend.set_flags(*own)


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Hide the operations of this block from the mode that is recording."""
    mode = _pop_mode_from_pre_dispatch()
    try:
        yield
    finally:
        _set_mode_pre_dispatch(mode)


def fake_mode() -> Any:
    """Tensors on a device without storage: for modules that cannot be built on meta."""
    return FakeTensorMode(allow_non_fake_inputs=True, export=True)


def in_transform() -> bool:
    """Whether vmap, grad or another functorch transform is active."""
    return peek_interpreter_stack() is not None
