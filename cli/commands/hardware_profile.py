"""autopar hardware profile: measure this machine and write a cluster file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cost_models.hardware import load_cluster
from ...cost_models.units import format_bytes, format_bytes_per_second, format_flops_per_second, format_seconds
from ...planner.errors import AutoparError
from ..console import print_json, print_note, print_result, progress_bar

DEFAULT_OUT = Path("measured.toml")


def profile(
    ranks: Annotated[int | None, typer.Option("--ranks", help="Ranks: all GPUs, or 2 on a CPU.", min=1)] = None,
    device: Annotated[str | None, typer.Option("--device", help="cuda or cpu; cuda where there is one.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="The file to write; default measured.toml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; write only with --out.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")] = False,
) -> None:
    """Measure this machine and write a cluster file that --cluster takes.

    autopar hardware profile --out my.toml && autopar plan model.py --gpus 2 --cluster my.toml
    """
    path = out if out is not None else None if is_json else DEFAULT_OUT
    if path is not None:
        _check_out(path, force=force)
    from ...compiler.profile import profile_machine

    with progress_bar("profile", is_quiet=quiet) as bar:
        profiled = profile_machine(ranks=ranks, device=device, progress=bar)
    document = profiled.document
    if path is not None:
        try:
            path.write_text(document.text(), encoding="utf-8")
        except OSError as error:
            raise AutoparError(
                f"cannot write {path}: {error.strerror}", fix="choose another file with --out"
            ) from error
    if is_json:
        print_json(
            {
                "path": str(path) if path is not None else None,
                "description": document.description,
                "source": document.source,
                "tables": document.values(),
            }
        )
        return
    assert path is not None
    cluster = load_cluster(str(path.resolve()))
    gpu, link = cluster.gpu, cluster.intra_node
    rates = ", ".join(f"{name} {format_flops_per_second(rate)}" for name, rate in gpu.peak_flops_per_second.items())
    print_result(f"{cluster.description}\nproducts: {rates}")
    print_result(f"memory: {format_bytes(gpu.hbm_bytes)} a rank at {format_bytes_per_second(gpu.hbm_bytes_per_second)}")
    print_result(
        f"a kernel: {format_seconds(gpu.launch_seconds or gpu.kernel_seconds)}; collectives: "
        f"{format_bytes_per_second(link.bytes_per_second)}, {format_seconds(link.latency_seconds)}"
    )
    print_note(f"wrote {path}; plan with --cluster {path}")


def _check_out(path: Path, *, force: bool) -> None:
    """Refuse before minutes of measuring what could not be written after them."""
    if path.suffix != ".toml":
        raise AutoparError(f"{path} has no ending .toml, by which --cluster knows a file", fix=f"--out {path}.toml")
    if path.is_dir() or not path.resolve().parent.is_dir():
        what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise AutoparError(f"{path} {what}", fix="choose another file with --out")
    if path.exists() and not force:
        raise AutoparError(f"{path} exists", fix="choose another file with --out, or replace it with --force")
