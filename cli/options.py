"""What options mean that take more than a word: key=value pairs, the folder for a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from ..planner.errors import AutoparError

ExactCapture = Annotated[
    bool,
    typer.Option("--exact-capture", help="Trace every operation with torch.export; repeated blocks are not shared."),
]
# Facts of a cluster that a user may know better than the catalogue.
HbmGib = Annotated[float | None, typer.Option("--hbm-gib", help="Memory of a GPU, instead of the catalogue's.")]
GpusPerNode = Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of a node.")]
NicsPerNode = Annotated[int | None, typer.Option("--nics-per-node", min=1, help="Network cards of a node.")]
NicGbit = Annotated[float | None, typer.Option("--nic-gbit-per-second", help="Rate of one network card.")]
IntraNode = Annotated[
    float | None, typer.Option("--intra-node-gb-per-second", help="Bus bandwidth of large collectives inside a node.")
]


def given_overrides(
    *,
    hbm_gib: float | None,
    gpus_per_node: int | None,
    nics_per_node: int | None,
    nic_gbit_per_second: float | None,
    intra_node_gb_per_second: float | None,
) -> Mapping[str, float]:
    """Those that were given, by the names of `cost_models.hardware.OVERRIDES`."""
    return {name: value for name, value in locals().items() if value is not None}


def parse_assignments(items: Iterable[str], *, option: str) -> dict[str, str]:
    """Read ["width=64", "preset=tiny"] into a mapping; values stay text.

    Raises:
        AutoparError: no "=", no key, or a key given twice.
    """
    found: dict[str, str] = {}
    for item in items:
        key, is_assigned, value = item.partition("=")
        key = key.strip()
        if not is_assigned or not key.isidentifier():
            raise AutoparError(f"cannot read {item!r}", where=option, fix=f"write {option} key=value")
        if key in found:
            raise AutoparError(f"{key} is given twice", where=option, fix=f"keep one {option} {key}=...")
        found[key] = value.strip()
    return found


def default_folder(model: str) -> Path:
    """Where `plan` writes without --out: ./gpt-autopar for models/gpt.py:build."""
    return Path(f"{Path(Path(model).name.partition(':')[0]).stem}-autopar")
