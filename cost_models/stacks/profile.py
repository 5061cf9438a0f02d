"""Software-stack profiles: which kernels run, as enumerated choices. Numbers belong to the hardware files."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from ..errors import AutoparError
from ..hardware.toml_file import is_path, nearest, read_toml

_FOLDER = Path(__file__).parent

# The first choice is what the emitted package does; a file may leave out all but fusion and float32_matmul.
CHOICES: dict[str, tuple[str, ...]] = {
    "fusion": ("eager", "kernels", "compiled"),
    "float32_matmul": ("ieee", "tf32"),
    "products": ("compute dtype", "float8"),
    "attention": ("flash", "flash 1", "materialised", "materialised, fused dropout"),
    "norms": ("kernel", "stepwise"),
    "loss": ("kernel", "stepwise", "fused", "fused, no copy"),
    "loss_logits": ("split", "gathered"),
    "embedding": ("split", "replicated"),
    "gathered_dtype": ("compute", "float8"),
    "gradient_dtype": ("compute", "float32", "float32 in messages"),
    "gradient_buffers": ("filled by the backward", "copied to"),
    "gradient_sync": ("exposed", "hidden", "hidden without tp"),
    "fsdp_overlap": ("always", "forward with tp"),
    "tp_overlap": ("none", "weight gradients"),
    "recompute": ("until last saved", "whole forward"),
    "fsdp": ("per parameter", "flat"),
    "zero_1": ("by block", "buckets"),
    "resharding": ("as planned", "never"),
    "accumulation": ("unsharded", "unsharded gradients", "sharded"),
    "pipeline_messages": ("whole", "scattered"),
    "pipeline_buffers": ("as scheduled", "outputs of two", "two a stage"),
    "interleaved_messages": ("in the background", "waited for"),
    "gathered_inputs": ("kept", "gathered again"),
    "vocabulary": ("as given", "padded"),
    "updates": ("in place", "copied"),
    "states": (
        "float32 master",
        "float32 master, compute gradients",
        "float32 master, both gradients",
        "compute dtype",
    ),
}
_REQUIRED = ("description", "source", "fusion", "float32_matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One profile.

    fusion: "eager" launches a kernel per operation; "kernels" has hand-written ones for chains of pointwise operations
    (bias and activation; bias, dropout and residual); "compiled" also fuses norms and copies into them.
    float32_matmul: float32 products on the float32 units ("ieee", PyTorch's default) or on the matrix units ("tf32").
    products: what the matrices of a model's blocks are multiplied in; "float8" scales and casts both operands first.
    attention: one fused kernel (of the second generation, or the first), or scores written between batched products,
    their softmax and dropout apart or in one kernel.
    norms: one kernel each, or float32 steps (square, mean, scale) one by one.
    loss: float32 copies of the logits and a kernel per step ("stepwise"), PyTorch's cross entropy ("kernel"), one pass
    over float32 logits ("fused"), or over the logits as they are ("fused, no copy"). loss_logits, embedding: whether
    the vocabulary stays split over tensor-parallel ranks in the loss, and in the input.
    gradient_buffers: whether the backward writes gradients where they are reduced over dp, or they are copied there
    and back (ZeRO-0 and 1; `fsdp` says it of 2 and 3).
    gathered_dtype: in which FSDP gathers the parameters of blocks. gradient_dtype: in which gradients are
    reduced and added up over microbatches, or reduced only ("float32 in messages").
    gradient_sync: whether an all_reduce of gradients hides behind the last backward. fsdp_overlap: whether FSDP hides
    behind compute beside tensor parallelism, or in the forward only.
    tp_overlap: whether the collective of an input's gradient runs beside the product of the weight's.
    recompute: full checkpointing repeats the forward up to its last saved tensor, or all of it.
    fsdp: "per parameter" (FSDP2) copies into and out of each collective's buffer, "flat" (FSDP1) does not.
    zero_1: gradients and parameters of ZeRO-1 pass through buffers of a block, or through DeepSpeed's buckets.
    resharding: "never" keeps gathered parameters until the step ends. accumulation: FSDP keeps whole gradients until
    the last microbatch, with the parameters or without them, or reduces in each.
    pipeline_messages: "scattered" sends each tensor-parallel rank's part of what they all hold and gathers behind.
    pipeline_buffers: what stages keep is as the schedule needs it; or the last one also keeps the logits of another
    microbatch; or all others have room for twice as many microbatches as there are stages, their parameters in the
    compute dtype included. interleaved_messages: with several stages per rank, whether both sides wait for each
    message.
    gathered_inputs: whether a product keeps the gathered tokens of sequence parallelism for its backward.
    vocabulary: "padded" to 128 rows per tensor-parallel rank.
    updates: with masters beside parameters of 16 bits, gradients are copied to float32 (and unscaled in fp16) before
    the optimizer's step and parameters back after it.
    states: what is kept per parameter beside the optimizer's moments; ZeRO-1 splits masters that are not what the
    module stores, which they are under "float32 master" alone.
    """

    name: str
    description: str
    source: str
    fusion: str
    float32_matmul: str
    products: str = "compute dtype"
    attention: str = "flash"
    norms: str = "kernel"
    loss: str = "kernel"
    loss_logits: str = "split"
    embedding: str = "split"
    gathered_dtype: str = "compute"
    gradient_buffers: str = "filled by the backward"
    gradient_dtype: str = "compute"
    gradient_sync: str = "exposed"
    fsdp_overlap: str = "always"
    tp_overlap: str = "none"
    recompute: str = "until last saved"
    fsdp: str = "per parameter"
    zero_1: str = "by block"
    resharding: str = "as planned"
    accumulation: str = "unsharded"
    pipeline_messages: str = "whole"
    pipeline_buffers: str = "as scheduled"
    interleaved_messages: str = "in the background"
    gathered_inputs: str = "kept"
    vocabulary: str = "as given"
    updates: str = "in place"
    states: str = "float32 master"


def stack_names() -> tuple[str, ...]:
    """Every stack of the package, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


@cache
def load_stack(name_or_path: str) -> Stack:
    """A stack by name or file.

    Raises:
        AutoparError: no such stack, or a file with an unknown key or choice.
    """
    if is_path(name_or_path):
        path = Path(name_or_path)
    elif name_or_path in stack_names():
        path = _FOLDER / f"{name_or_path}.toml"
    else:
        raise AutoparError(f"there is no stack {name_or_path!r}", fix=nearest(name_or_path, stack_names()))
    values = read_toml(path)
    names = {field.name for field in fields(Stack)} - {"name"}
    for key in values:
        if key not in names:
            raise AutoparError(f"{key} is no setting of a stack", where=str(path), fix=nearest(key, names))
    texts: dict[str, str] = {}
    for key in sorted(names):
        if key not in values and key not in _REQUIRED:
            continue
        value = values.get(key)
        if not isinstance(value, str) or not value:
            raise AutoparError(f"{key} is missing or no text", where=str(path), fix=f'add {key} = "..."')
        if key in CHOICES and value not in CHOICES[key]:
            raise AutoparError(f"{key} is {value!r}", where=str(path), fix=nearest(value, CHOICES[key]))
        texts[key] = value
    return Stack(name=path.stem, **texts)


EAGER = load_stack("eager")
