"""A row -> the model, cluster, software stack and pinned configuration it describes, or the reason why not.

Which stack a source ran is said in `SOFTWARE`, once per source; everything else is read from the row's columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from autopar.cost_models.hardware import Cluster, cluster_names, load_cluster
from autopar.cost_models.hardware.toml_file import nearest
from autopar.cost_models.stacks import Stack, load_stack

from .models import Shape
from .rows import Row

_STACKS = Path(__file__).resolve().parents[1] / "stacks"
_PADDED_ROWS = 128
_MOST_LAYERS = 10_000

# Column `gpu`, up to the first blank -> name of a cluster in the catalogue.
_CLUSTERS = {
    "a100-80g": "a100-80g-sxm", "a100-40g": "a100-40g-sxm", "v100-16g": "v100-16g-sxm2", "v100-32g": "v100-32g-sxm2",
    "h100-96g-hbm2e-500w": "h100-96g-500w",
}  # fmt: skip
# Node shapes that a cluster file of its own describes: (cluster, GPUs per node) -> cluster.
_SHAPES = {("h200", 4): "h200-4", ("a100-40g-sxm", 4): "a100-40g-sxm-4", ("v100-16g-sxm2", 4): "v100-16g-sxm2-4",
           ("v100-32g-sxm2", 4): "v100-32g-sxm2-4"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What a source ran: a stack file, and how its models differ from the sample models."""

    stack: str
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    # What its memory column has: "computed", "allocated" (by PyTorch), or what nvidia-smi shows of PyTorch with its
    # allocator's cache ("cached") or of a program that plans its memory ahead ("planned").
    memory: str = "cached"
    recomputes: bool = False  # unless a row says that it does not
    # What its pipelines deal out evenly: "blocks", or "layers", to which embedding, last norm and head belong too.
    dealt: str = "blocks"


# Family -> software. Source: the papers and repositories named in data/README.md.
SOFTWARE = {
    "vtrain-multi": Software(stack="megatron-deepspeed-2023", dropout=0.1),
    "narayanan-t1": Software(stack="megatron-2021", dropout=0.1),
    "narayanan-t2": Software(stack="megatron-2021", dropout=0.1),
    "korthikanti-t5": Software(stack="megatron-2022", dropout=0.1),
    "korthikanti-fig1": Software(stack="megatron-2022", dropout=0.1, memory="computed"),
    "bloom": Software(stack="megatron-deepspeed", dropout=0.0),
    "tr3m": Software(stack="megatron-deepspeed", dropout=0.1),
    "oneflow": Software(stack="oneflow", dropout=0.1, memory="planned"),
    "llm-foundry": Software(stack="llm-foundry", bias=False),
    "torchtitan": Software(stack="torchtitan", bias=False, tied=False, memory="allocated"),
    "kempnerforge": Software(stack="kempnerforge", bias=False, tied=False, memory="allocated"),
    "fms-fsdp": Software(stack="fms-fsdp", bias=False, tied=False),
    "nanotron": Software(stack="nanotron", bias=False, tied=True, memory="allocated"),
    "megatron-bridge": Software(stack="megatron-2024", bias=False, tied=False, recomputes=True),
    "nemo": Software(stack="megatron-2024", bias=False, tied=False, recomputes=True),
    "llama3-paper": Software(stack="megatron-2024", bias=False, tied=False),
    "scaling": Software(stack="scaling", bias=False, tied=False, dealt="layers"),
    "internevo": Software(stack="internevo", bias=False, tied=False),
    "flash-attention": Software(stack="flash-attention", dropout=0.1),
    "mt-nlg": Software(stack="megatron-deepspeed-float32", dropout=0.1),
}


# Sources that compare frameworks or kernels name behind the model, in parentheses, which one ran: it -> stack.
_COMPARED = {
    "megatron": "megatron-2021-whole", "scaling_torch": "scaling-torch", "scaling_fused": "scaling-fused",
    "scaling_flash1": "scaling-flash1", "scaling_flash2rms": "scaling-flash2rms",
}  # fmt: skip


class CannotExpress(Exception):
    """Why a row has no prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything a prediction needs. `microbatch_sizes` and `interleaves` have one entry where the row states it."""

    shape: Shape
    layers: int
    width: int
    cluster: Cluster
    stack: Stack
    precision: str
    tp: int
    pp: int
    dp: int
    replicas: int
    zero: int
    policy: str
    schedule: str
    sequence_parallel: bool
    memory: str
    dealt: str
    global_batch: int
    microbatch_sizes: tuple[int, ...]
    interleaves: tuple[int, ...]


def setup_of(row: Row) -> Setup:
    """Read a row.

    Raises:
        CannotExpress: a size is missing, or the row uses what the planner has no model of.
    """
    _refuse(row)
    software = SOFTWARE[row.family]
    stack = _stack(row, software)
    layers, width, heads = row.layers, row.hidden, row.heads
    assert layers is not None
    assert width is not None
    assert heads is not None
    assert row.global_batch
    return Setup(
        shape=_shape(row, software, stack),
        layers=layers,
        width=width,
        cluster=_cluster(row),
        stack=stack,
        precision=_precision(row),
        tp=row.tp,
        pp=row.pp,
        dp=row.dp,
        replicas=row.hsdp_replicas if "hsdp" in row.fsdp.lower() else 1,
        zero=_zero(row),
        policy=_policy(row),
        schedule="none" if row.pp == 1 else "1f1b",
        sequence_parallel=row.sequence_parallel,
        memory=software.memory,
        dealt=software.dealt,
        global_batch=row.global_batch,
        microbatch_sizes=_microbatch_sizes(row),
        interleaves=_interleaves(row, layers),
    )


def _refuse(row: Row) -> None:
    if row.problem:
        raise CannotExpress(row.problem)
    if row.family not in SOFTWARE:
        raise CannotExpress(f"no software stack is known for family {row.family!r}")
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_len", "global_batch"):
        if not getattr(row, name):
            raise CannotExpress(f"{name} is not stated")
    if row.layers and row.layers > _MOST_LAYERS:
        raise CannotExpress(f"layers is {row.layers}")
    if SOFTWARE[row.family].recomputes and not row.checkpointing:
        raise CannotExpress("what is recomputed is not stated")
    if row.ep > 1:
        raise CannotExpress("expert parallelism")
    if row.cp > 1:
        raise CannotExpress("context parallelism")
    if row.float8 not in ("no", "") and not row.has_float8:
        raise CannotExpress(f"products in less than 8 bits ({row.float8})")
    if row.dp * row.tp * row.pp != row.gpus:
        raise CannotExpress(f"dp {row.dp} x tp {row.tp} x pp {row.pp} is not {row.gpus} GPUs")


def _shape(row: Row, software: Software, stack: Stack) -> Shape:
    assert row.vocab is not None
    assert row.heads is not None
    vocab = row.vocab
    if stack.vocabulary == "padded":
        multiple = _PADDED_ROWS * row.tp
        vocab = ceil(vocab / multiple) * multiple
    arguments: dict[str, object] = {"vocab_size": vocab, "context": row.seq_len, "num_heads": row.heads,
                                    "width": row.hidden, "hidden": row.ffn}  # fmt: skip
    if row.is_gated:
        arguments |= {"num_kv_heads": row.kv_heads, "tied": software.tied}
        return Shape(file="llama.py", arguments=tuple(arguments.items()))
    if row.kv_heads != row.heads:
        raise CannotExpress("grouped key-value heads without a gated MLP")
    arguments |= {"dropout": software.dropout, "bias": software.bias}
    return Shape(file="gpt.py", arguments=tuple(arguments.items()))


def _stack(row: Row, software: Software) -> Stack:
    name = software.stack
    # Runs after this date accumulate bf16 gradients in float32. Source: the notes of the runs.
    if match := re.search(r"src date (\d\d)-(\d\d)", row.notes):
        name += "-float32" if (int(match[1]), int(match[2])) >= (2, 28) else ""
    if match := re.search(r"\((\w+)\)$", row.model):
        name = _COMPARED.get(match[1], name)
    if "pure" in row.precision:
        name += "-pure"
    if row.compiled.startswith("yes") and (_STACKS / f"{name}-compiled.toml").exists():
        name += "-compiled"
    stack = load_stack(str(_STACKS / f"{name}.toml"))
    if row.has_float8:
        stack = replace(stack, products="float8", gathered_dtype="float8" if "all-gather" in row.float8 else "compute")
    return stack


def _cluster(row: Row) -> Cluster:
    gpu = row.gpu.lower().split(" ")[0]
    name = _CLUSTERS.get(gpu, gpu)
    if not gpu:
        raise CannotExpress("gpu is not stated")
    if "omni-path" in row.interconnect.lower() and row.gpus_per_node == 8:
        name = "a100-80g-sxm-2x4"  # the only such nodes of 8 in the catalogue
    name = _SHAPES.get((name, row.gpus_per_node), name) if row.gpus_per_node else name
    if name not in cluster_names():
        raise CannotExpress(f"{row.gpu} is not in the hardware catalogue: {nearest(name, cluster_names())}")
    nics, rate = _network(row.interconnect)
    base = load_cluster(name)
    return load_cluster(
        name,
        gpus_per_node=None if row.gpus_per_node in (None, base.gpus_per_node) else row.gpus_per_node,
        nics_per_node=nics,
        nic_gbit_per_second=rate,
    )


def _network(text: str) -> tuple[int | None, float | None]:
    """(NICs per node, Gbit/s of each) as stated; None: not stated."""
    if match := re.search(r"(\d+)x [^;]*?(\d{2,3})(?: ?Gb)?[^;]*per node", text, re.IGNORECASE):
        return int(match[1]), float(match[2])
    if match := re.search(r"(\d+) ?Gb/s per node", text):
        total = float(match[1])
        nics = max(1, round(total / 200))
        return nics, total / nics
    if match := re.search(r"(\d+) ?Gb/s per GPU", text):
        return None, float(match[1])
    if match := re.search(r"Omni-Path (\d+)Gb", text):
        return None, float(match[1])
    return None, None


def _precision(row: Row) -> str:
    """Of what no low-precision product computes."""
    text = row.precision.lower()
    if "bf16" in text:
        return "bf16"
    return next((name for name in ("fp16", "fp32") if name in text), "bf16")


def _zero(row: Row) -> int:
    text = row.fsdp.lower()
    if row.dp == 1:
        return 0
    named = next((stage for stage in (3, 2, 1) if f"zero{stage}" in text), None)
    if named is None:
        named = 3 if "fsdp" in text or "hsdp" in text else 0
    return named


def _policy(row: Row) -> str:
    text = row.checkpointing
    if text in ("none", "") or text.startswith("none"):
        return "none"
    if text == "full":
        return "full"
    if "attention" in text:
        return "attention"
    if "2nd" in text:
        return "alternate"
    if "op" in text:
        return "operations"
    if "partial" in text:
        return "most"
    raise CannotExpress(f"activation checkpointing {text!r}")


def _microbatch_sizes(row: Row) -> tuple[int, ...]:
    assert row.global_batch
    if row.microbatch:
        return (row.microbatch,)
    share = row.global_batch // row.dp
    return tuple(b for b in (1, 2, 4, 8) if share % b == 0)


def _interleaves(row: Row, layers: int) -> tuple[int, ...]:
    if "interleaved" not in row.schedule or row.pp == 1:
        return (1,)
    if row.vpp:
        return (row.vpp,)
    return tuple(v for v in range(1, layers // row.pp + 1) if layers // row.pp % v == 0)


__all__ = ["SOFTWARE", "CannotExpress", "Setup", "Software", "setup_of"]
