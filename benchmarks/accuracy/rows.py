"""A CSV file of published runs -> typed rows. What a source left out is None, never a guess."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.cost_models.errors import AutoparError

OUT_OF_MEMORY = "OOM"
# Without these a file is of another kind; every other column, and every cell, may be left out.
_REQUIRED = (
    "family", "layers", "hidden", "ffn", "heads", "vocab", "seq_len", "gpu", "gpus", "global_batch_seqs", "tp", "pp",
    "dp", "measured_step_s",
)  # fmt: skip


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
    gpus_per_node: int | None
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
    contaminated: str = ""  # why its measurement contradicts its neighbours or its own columns

    @property
    def has_float8(self) -> bool:
        """Whether its matrix products ran in 8 bits."""
        return self.float8 not in ("", "no") and "fp4" not in self.float8

    @property
    def scored_as(self) -> str:
        """The family, or its rows with products of 8 bits."""
        return f"{self.family} fp8" if self.has_float8 else self.family


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a line; what cannot be read is left out and told in `problems`."""

    line: dict[str | None, str | list[str] | None]
    problems: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        found = self.line.get(name)
        return found.strip() if isinstance(found, str) else ""

    def number(self, name: str) -> float | None:
        text = self.text(name)
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
        if found is not None and found != int(found):
            self.problems.append(f"{name} is {self.text(name)}, no whole number")
        return None if found is None else int(found)

    def axis(self, name: str) -> int:
        found = self.count(name)
        if found == 0:
            self.problems.append(f"{name} is 0")
        return found or 1


def read_rows(path: Path) -> tuple[Row, ...]:
    """Every row of the file, in its order. Columns beyond those of `Row` are ignored.

    Raises:
        AutoparError: there is no such file, it is no CSV text, it has no rows, or a column is missing.
    """
    where, fix = str(path), "give a CSV file of runs; benchmarks/data/README.md describes the columns"
    try:
        # Spreadsheets write a byte order mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            names = [name.strip() for name in reader.fieldnames or ()]
            if not names:
                raise AutoparError("the file is empty", where=where, fix=fix)
            missing = [name for name in _REQUIRED if name not in names]
            if missing:
                raise AutoparError(f"column {', '.join(map(repr, missing))} is missing", where=where, fix=fix)
            reader.fieldnames = names
            rows = tuple(_row(line, reader.line_num) for line in reader)
    except OSError as error:
        raise AutoparError(f"cannot read {path}: {error.strerror}", fix=fix) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise AutoparError(f"this is no CSV text in UTF-8: {error}", where=where, fix=fix) from error
    if not rows:
        raise AutoparError("there is a header and no row", where=where, fix=fix)
    return rows


def _row(line: dict[str | None, str | list[str] | None], number: int) -> Row:
    cells = _Cells(line)
    if None in line:
        cells.problems.append("more cells than columns: a comma outside quotes?")
    ran_out = cells.text("peak_mem_gib").upper() == OUT_OF_MEMORY
    row = Row(
        id=cells.text("id") or f"line {number}",
        family=cells.text("family"),
        model=cells.text("model"),
        notes=cells.text("notes"),
        layers=cells.count("layers"),
        hidden=cells.count("hidden"),
        ffn=cells.count("ffn"),
        heads=cells.count("heads"),
        kv_heads=cells.count("kv_heads"),
        vocab=cells.count("vocab"),
        seq_len=cells.count("seq_len"),
        is_gated=cells.text("gated_mlp").startswith("yes"),
        gpu=cells.text("gpu"),
        gpus=cells.axis("gpus"),
        gpus_per_node=cells.count("gpus_per_node"),
        interconnect=cells.text("interconnect"),
        precision=cells.text("precision"),
        global_batch=cells.count("global_batch_seqs"),
        microbatch=cells.count("micro_batch_seqs"),
        tp=cells.axis("tp"),
        pp=cells.axis("pp"),
        vpp=cells.count("vpp"),
        dp=cells.axis("dp"),
        cp=cells.axis("cp"),
        ep=cells.axis("ep"),
        fsdp=cells.text("fsdp"),
        hsdp_replicas=cells.axis("hsdp_replicas"),
        sequence_parallel=cells.text("sequence_parallel").startswith("yes"),
        checkpointing=cells.text("activation_checkpointing"),
        schedule=cells.text("schedule"),
        compiled=cells.text("compile"),
        float8=cells.text("float8"),
        measured_seconds=cells.number("measured_step_s"),
        peak_memory_gib=None if ran_out else cells.number("peak_mem_gib"),
        ran_out_of_memory=ran_out,
        contaminated=cells.text("contaminated"),
    )
    return replace(row, problem="; ".join(cells.problems))
