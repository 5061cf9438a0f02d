"""`--input name=int64[B,1024]`: an input that the model file does not make."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cost_models.errors import AutoparError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """`--input name=int64[B,1024]<50257`: B is the batch size; integers lie in [0, limit), 2 without a limit."""

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    limit: int | None = None

    def tensor(self, batch_size: int, generator: torch.Generator, *, device: str = "cpu") -> Tensor:
        """Values of the input; those on meta take no memory.

        Raises:
            AutoparError: it does not fit in this machine's memory.
        """
        shape = [batch_size if size is None else size for size in self.shape]
        dtype = getattr(torch, self.dtype)
        try:
            if device == "meta":
                return torch.empty(shape, dtype=dtype, device="meta")
            return self._drawn(shape, dtype, generator).to(device)
        except RuntimeError as error:
            raise AutoparError(
                f"cannot make the input {self.name} of shape {shape}: {str(error).splitlines()[0]}",
                fix=f"give --input {self.name} smaller sizes",
            ) from error

    def _drawn(self, shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, dtype=dtype, generator=generator, device="cpu")
        return torch.randint(self.limit or 2, shape, generator=generator, device="cpu").to(dtype)


_SPEC = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:<(?P<limit>\d+))?")


def parse_input(name: str, text: str) -> InputSpec:
    """Read the right-hand side of `--input name=...`.

    Raises:
        AutoparError: not of the form dtype[sizes], or no such dtype.
    """
    match = _SPEC.fullmatch(text.replace(" ", ""))
    fix = f"write --input {name}=int64[B,1024]; B is the batch size, int64[B,1024]<50257 bounds the values"
    if match is None:
        raise AutoparError(f"cannot read --input {name}={text}", fix=fix)
    dtype = {"float": "float32", "int": "int64", "long": "int64"}.get(match["dtype"], match["dtype"])
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise AutoparError(f"--input {name}={text}: torch has no dtype {dtype!r}", fix=fix)
    sizes = [size for size in match["shape"].split(",") if size]
    if not all(size == "B" or size.isdigit() for size in sizes):
        raise AutoparError(f"--input {name}={text}: sizes are numbers or B", fix=fix)
    limit = int(match["limit"]) if match["limit"] else None
    if limit == 0:
        raise AutoparError(f"--input {name}={text}: no value lies below 0", fix=fix)
    shape = tuple(None if size == "B" else int(size) for size in sizes)
    return InputSpec(name=name, dtype=dtype, shape=shape, limit=limit)
