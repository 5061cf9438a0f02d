"""Small tensors that the capture lifts out of the user's code, as values."""

from __future__ import annotations

from torch import Tensor

from ..errors import UnsupportedModel

MAX_CONSTANT_ELEMENTS = 1 << 16


class NeedsValues(UnsupportedModel):
    """The capture on meta tensors lost something that real tensors have: build the module on the CPU."""


def constant_of(value: object, name: str) -> object:
    """The values of a constant as nested tuples.

    Raises:
        NeedsValues: it has none, being on meta.
        UnsupportedModel: it is too large, or trained.
    """
    if not isinstance(value, Tensor):
        raise UnsupportedModel(f"constant {name} is no tensor")
    if value.is_meta:
        raise NeedsValues(f"constant {name} has no value on meta")
    if value.requires_grad:
        raise UnsupportedModel(
            f"tensor {name} requires a gradient but is no parameter", fix="make it an nn.Parameter of a module"
        )
    if value.numel() > MAX_CONSTANT_ELEMENTS:
        raise UnsupportedModel(f"constant {name} has {value.numel()} elements", fix="register it with register_buffer")
    return _nested_tuples(value.detach().tolist())


def _nested_tuples(value: object) -> object:
    return tuple(_nested_tuples(item) for item in value) if isinstance(value, list) else value
