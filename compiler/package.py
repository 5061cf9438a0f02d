"""The emitted package: all its files as text, and how they reach a folder without harm to what is there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..cost_models.hardware.toml_file import is_path
from ..cost_models.stacks import load_stack
from ..planner.capture.graph import ModelGraph
from ..planner.checkpointing import refuse_selective
from ..planner.edits import completed, priced_again
from ..planner.errors import AutoparError
from ..planner.placements import program_of
from ..planner.plan import Plan
from ..planner.plan_json import plan_to_json, rounded
from ..planner.search.split_backward import loses_weights
from .exporters.pytorch import Options, Provenance, options_of, render_files
from .interrupts import interrupts_held
from .launchers.torchrun import render_training
from .lower import LoweredModel, lower

EXECUTABLE = ("launch.sh",)


def render_package(plan: Plan, graph: ModelGraph, *, folder: Path = Path()) -> dict[str, str]:
    """File name -> text of everything that a plan is emitted as. Paths of the plan are counted from `folder`.

    Raises:
        AutoparError: the plan does not fit the model, or holds something that cannot be written.
    """
    plan = rounded(plan)  # emitted again from the file it is the same text
    model, options = _checked(plan, graph)
    is_fused = any(tensor.fused_dim is not None for stage in model.stages for tensor in stage.tensors)
    source = f"{Path(plan.model.path).name}:{plan.model.name}"
    provenance = Provenance(version=plan.autopar_version, source=source, plan=plan.fingerprint[:12])
    return {
        "plan.json": plan_to_json(plan),
        **render_files(model, options, provenance),
        **render_training(plan, graph, is_fused=is_fused, folder=folder),
    }


def _checked(plan: Plan, graph: ModelGraph) -> tuple[LoweredModel, Options]:
    """The plan's programs and policies, if code can be written for them."""
    stages = [(stage.first, stage.last) for stage in plan.stages]
    refuse_selective(graph, (plan.activation_checkpoint, *plan.checkpoint_by_block.values()), where="plan.json")
    model, options = lower(program_of(plan, graph), stages), options_of(plan)
    if reason := loses_weights(model.program, plan.schedule, stages):
        raise AutoparError(
            reason,
            where="plan.json: schedule, stages",
            fix="choose a schedule that does not split the backward, such as 1f1b or interleaved",
        )
    return model, options


def after_edits(plan: Plan, graph: ModelGraph) -> Plan:
    """The plan of a file with all that follows from its decisions, which a person may have changed.

    Raises:
        AutoparError: as `render_package`.
    """
    plan = completed(plan, graph)
    _checked(plan, graph)  # what cannot be written is not priced
    return priced_again(plan, graph)


def check_stack(stack: str) -> None:
    """What a plan is priced for can be written: the package multiplies in the plan's precision.

    Raises:
        AutoparError: the stack multiplies in 8 bits.
    """
    if load_stack(stack).products == "float8":
        raise AutoparError(
            "products in float8 are predicted, not emitted: the package multiplies in the plan's precision",
            where=f"--stack {stack}",
            fix="plan with --json and without --out for the prediction alone, or leave products out of the stack",
        )


def emit_package(
    plan: Plan, graph: ModelGraph, out: Path, *, force: bool, progress: Callable[[str], None] | None = None
) -> tuple[Path, ...]:
    """Write the package of a plan whose paths are counted from `out`, all files or none, and return their paths.

    `progress` is told when the files are about to be written: nothing of the plan can be refused any more.

    Raises:
        AutoparError: the plan's stack cannot be written, or `out` is a file, holds files and `force` is off, or cannot
            be written.
    """
    check_stack(os.path.normpath(out / plan.stack) if is_path(plan.stack) else plan.stack)
    files = render_package(plan, graph, folder=out)
    if progress is not None:
        progress(f"writing {out}")
    return write_files(files, out, force=force)


def write_files(files: dict[str, str], out: Path, *, force: bool) -> tuple[Path, ...]:
    """Write all files into a folder or none. With `force` files of the same names are replaced, others are left alone.

    Raises:
        AutoparError: as `emit_package`.
    """
    check_folder(out, force=force)
    try:
        taken = [name for name in sorted(files) if (out / name).is_dir()]
        if taken:
            raise AutoparError(f"{out / taken[0]} is a folder", fix="move it away, or choose another folder with --out")
        with _made(out), tempfile.TemporaryDirectory(prefix=".autopar-", dir=out) as folder:
            for name, text in sorted(files.items()):
                path = Path(folder, name)
                path.write_text(text, encoding="utf-8", newline="\n")
                path.chmod(0o755 if name in EXECUTABLE else 0o644)
            # Everything is on the disk: only renames are left, which need no space.
            with interrupts_held():
                for name in sorted(files):
                    os.replace(Path(folder, name), out / name)
    except OSError as error:
        raise AutoparError(
            f"cannot write to {out}: {error.strerror or error}", fix="choose another folder with --out"
        ) from error
    return tuple(out / name for name in sorted(files))


@contextmanager
def _made(out: Path) -> Iterator[None]:
    """The folder, which is there; one that was not is taken away again where the block fails or is interrupted."""
    there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        if not there:
            with suppress(OSError):
                out.rmdir()
        raise


def check_folder(out: Path, *, force: bool) -> None:
    """Refuse a folder that cannot take the package, before any work is done.

    Raises:
        AutoparError: as `emit_package`.
    """
    try:
        if not out.exists():
            return
        if not out.is_dir():
            raise AutoparError(f"{out} is a file", fix="choose a folder with --out")
        there = sorted(path.name for path in out.iterdir())
    except OSError as error:
        raise AutoparError(f"cannot read {out}: {error.strerror}", fix="choose another folder with --out") from error
    if there and not force:
        shown = ", ".join(there[:3]) + (", ..." if len(there) > 3 else "")
        raise AutoparError(
            f"{out} is not empty: {shown}",
            fix="choose another folder with --out, or replace the files that autopar writes with --force",
        )


__all__ = ["after_edits", "check_folder", "emit_package", "render_package", "write_files"]
