"""Around every trace of the user's forward: quiet, refusing what a graph would lose, noting who asks for the mode."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import UnsupportedModel
from .user_lines import TORCH, in_frames

_PRIMITIVE = "GeneratedBackwardFor_prims_"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs and prints the whole graph before it raises
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(io.StringIO()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


@contextlib.contextmanager
def refusing_lost_gradients() -> Iterator[None]:
    """Refuse what the exported graph would silently drop."""

    original: Any = torch.autograd.Function.apply

    def apply(cls: type, *args: object, **kwargs: object) -> object:
        name = cls.__name__
        if name.startswith(_PRIMITIVE):  # inside of an operation of torch
            return original.__func__(cls, *args, **kwargs)
        checkpoint = name == "CheckpointFunction"
        raise UnsupportedModel(
            "reentrant activation checkpointing loses its gradients in the capture"
            if checkpoint
            else f"custom autograd function {name}: its backward would be lost in the capture",
            where=in_frames(traceback.extract_stack()),
            fix="use checkpoint(..., use_reentrant=False), or leave checkpointing to the plan"
            if checkpoint
            else "write it with differentiable tensor operations",
        )

    def register_hook(self: Tensor, hook: object) -> object:
        raise UnsupportedModel(
            "a hook on a tensor's gradient would be lost in the capture",
            where=in_frames(traceback.extract_stack()),
            fix="write the change of the gradient with tensor operations",
        )

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(Tensor, "register_hook", register_hook),
        _SeededConstants() as seeded,
        mock.patch.object(torch, "Generator", seeded.generator),
    ):
        yield


class _SeededConstants(TorchFunctionMode):
    """Draws from a generator that the traced code itself makes are the same in every step: constants."""

    def __init__(self) -> None:
        super().__init__()

        class Seeded(torch.Generator):
            """What `torch.Generator` is meanwhile: still a class, since annotations of modules imported now name it."""

        self.generator = Seeded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None:
            return func(*args, **kwargs)
        if not isinstance(generator, self.generator):
            raise UnsupportedModel(
                "the forward draws from a torch.Generator of its own, whose state the emitted code cannot share",
                where=in_frames(traceback.extract_stack()),
                fix="draw from the default generator, or outside of forward",
            )
        with _disable_current_modes():
            return func(*args, **kwargs)


@contextlib.contextmanager
def recording_training_reads() -> Iterator[set[str]]:
    """Which modules read `self.training` while the block runs: none means that eval mode is the same."""
    reads: set[str] = set()

    def read(self: nn.Module) -> bool:
        file = sys._getframe(1).f_code.co_filename
        if not file.startswith(TORCH) or f"{TORCH}/nn/modules/" in file and not file.endswith("/module.py"):
            reads.add(type(self).__name__)
        return self.__dict__["training"]

    def write(self: nn.Module, value: bool) -> None:
        self.__dict__["training"] = value

    nn.Module.training = property(read, write)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield reads
    finally:
        del nn.Module.training
