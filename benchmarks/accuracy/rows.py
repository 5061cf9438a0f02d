"""A CSV file of published runs -> typed rows. What a source left out is None, never a guess."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
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
    problem: str = ""  # why the line cannot be read


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The numbers of a line; what is none is left out and told in `problems`."""

    line: dict[str, str]
    problems: list[str] = field(default_factory=list)

    def number(self, name: str) -> float | None:
        text = (self.line[name] or "").strip()
        try:
            found = float(text) if text else None
        except ValueError:
            self.problems.append(f"{name} is {text!r}, no number")
            return None
        if found is not None and not 0 <= found < float("inf"):
            self.problems.append(f"{name} is {text}")
            return None
        return found

    def count(self, name: str) -> int | None:
        found = self.number(name)
        return None if found is None else int(found)

    def axis(self, name: str) -> int:
        found = self.count(name)
        if found == 0:
            self.problems.append(f"{name} is 0")
        return found or 1


def read_rows(path: Path) -> tuple[Row, ...]:
    """Every row of the file, in its order.

    Raises:
        AutoparError: there is no such file, or a column is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return tuple(_row(line) for line in csv.DictReader(file))
    except OSError as error:
        raise AutoparError(f"cannot read {path}: {error.strerror}", fix="give a CSV file of runs") from error
    except KeyError as error:
        raise AutoparError(f"column {error.args[0]!r} is missing", where=str(path), fix="see data/README.md") from error


def _row(line: dict[str, str]) -> Row:
    numbers = _Numbers(line)
    ran_out = line["peak_mem_gib"].strip() == OUT_OF_MEMORY
    row = Row(
        id=line["id"],
        family=line["family"],
        model=line["model"],
        notes=line["notes"],
        layers=numbers.count("layers"),
        hidden=numbers.count("hidden"),
        ffn=numbers.count("ffn"),
        heads=numbers.count("heads"),
        kv_heads=numbers.count("kv_heads"),
        vocab=numbers.count("vocab"),
        seq_len=numbers.count("seq_len"),
        is_gated=line["gated_mlp"].startswith("yes"),
        gpu=line["gpu"],
        gpus=numbers.axis("gpus"),
        gpus_per_node=numbers.axis("gpus_per_node"),
        interconnect=line["interconnect"],
        precision=line["precision"],
        global_batch=numbers.count("global_batch_seqs"),
        microbatch=numbers.count("micro_batch_seqs"),
        tp=numbers.axis("tp"),
        pp=numbers.axis("pp"),
        vpp=numbers.count("vpp"),
        dp=numbers.axis("dp"),
        cp=numbers.axis("cp"),
        ep=numbers.axis("ep"),
        fsdp=line["fsdp"],
        hsdp_replicas=numbers.axis("hsdp_replicas"),
        sequence_parallel=line["sequence_parallel"].startswith("yes"),
        checkpointing=line["activation_checkpointing"],
        schedule=line["schedule"],
        compiled=line["compile"],
        float8=line["float8"],
        measured_seconds=numbers.number("measured_step_s"),
        peak_memory_gib=None if ran_out else numbers.number("peak_mem_gib"),
        ran_out_of_memory=ran_out,
    )
    return replace(row, problem="; ".join(numbers.problems))
