"""A CSV file of published runs -> typed rows. What a source left out is None, never a guess."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from autopar.cost_models.errors import AutoparError

OUT_OF_MEMORY = "OOM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published run. Sizes are global; `peak_memory_gib` None: not stated; `ran_out_of_memory`: it did not fit."""

    id: str
    family: str
    model: str
    notes: str
    layers: int | None
    hidden: int | None
    ffn: int | None
    heads: int | None
    kv_heads: int | None
    vocab: int | None
    seq_len: int | None
    is_gated: bool
    gpu: str
    gpus: int
    gpus_per_node: int
    interconnect: str
    precision: str
    global_batch: int | None
    microbatch: int | None
    tp: int
    pp: int
    vpp: int | None
    dp: int
    cp: int
    ep: int
    fsdp: str
    hsdp_replicas: int
    sequence_parallel: bool
    checkpointing: str
    schedule: str
    compiled: str
    float8: str
    measured_seconds: float | None
    peak_memory_gib: float | None
    ran_out_of_memory: bool


def _number(text: str) -> float | None:
    return float(text) if text.strip() else None


def _count(text: str) -> int | None:
    number = _number(text)
    return None if number is None else int(number)


def _axis(text: str) -> int:
    return int(float(text)) if text.strip() else 1


def read_rows(path: Path) -> tuple[Row, ...]:
    """Every row of the file, in its order.

    Raises:
        AutoparError: there is no such file, a column is missing, or a number is none.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return tuple(_row(line) for line in csv.DictReader(file))
    except OSError as error:
        raise AutoparError(f"cannot read {path}: {error.strerror}", fix="give a CSV file of runs") from error
    except KeyError as error:
        raise AutoparError(f"column {error.args[0]!r} is missing", where=str(path), fix="see data/README.md") from error
    except ValueError as error:
        raise AutoparError(str(error), where=str(path), fix="numbers are plain decimals") from error


def _row(line: dict[str, str]) -> Row:
    peak = line["peak_mem_gib"].strip()
    return Row(
        id=line["id"],
        family=line["family"],
        model=line["model"],
        notes=line["notes"],
        layers=_count(line["layers"]),
        hidden=_count(line["hidden"]),
        ffn=_count(line["ffn"]),
        heads=_count(line["heads"]),
        kv_heads=_count(line["kv_heads"]),
        vocab=_count(line["vocab"]),
        seq_len=_count(line["seq_len"]),
        is_gated=line["gated_mlp"].startswith("yes"),
        gpu=line["gpu"],
        gpus=_axis(line["gpus"]),
        gpus_per_node=_axis(line["gpus_per_node"]),
        interconnect=line["interconnect"],
        precision=line["precision"],
        global_batch=_count(line["global_batch_seqs"]),
        microbatch=_count(line["micro_batch_seqs"]),
        tp=_axis(line["tp"]),
        pp=_axis(line["pp"]),
        vpp=_count(line["vpp"]),
        dp=_axis(line["dp"]),
        cp=_axis(line["cp"]),
        ep=_axis(line["ep"]),
        fsdp=line["fsdp"],
        hsdp_replicas=_axis(line["hsdp_replicas"]),
        sequence_parallel=line["sequence_parallel"].startswith("yes"),
        checkpointing=line["activation_checkpointing"],
        schedule=line["schedule"],
        compiled=line["compile"],
        float8=line["float8"],
        measured_seconds=_number(line["measured_step_s"]),
        peak_memory_gib=None if peak in ("", OUT_OF_MEMORY) else float(peak),
        ran_out_of_memory=peak == OUT_OF_MEMORY,
    )
