"""autopar plan: search for the best plan and write the package."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...planner import plan_tables, summary
from ...planner.diff import diff_plans
from ...planner.diff_tables import diff_tables, headline
from ...planner.errors import AutoparError, CheckFailed
from ...planner.plan import Plan
from ...planner.plan_json import plan_to_json, read_plan, relative_to, rounded
from ...planner.replay import parse_mesh, parse_shares
from ...planner.timeline import parse_slow
from ...planner.zero import pin_of
from ..console import Progress, print_note, print_result, print_table, progress
from ..options import (
    ExactCapture,
    GpusPerNode,
    HbmGib,
    IntraNode,
    NicGbit,
    NicsPerNode,
    default_folder,
    given_overrides,
    parse_assignments,
)

if TYPE_CHECKING:
    from ...planner.driver import PlanRequest

DEFAULT_CLUSTER = "h100-sxm"


class Precision(Enum):
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Optimizer(Enum):
    ADAMW = "adamw"
    SGD = "sgd"


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL.py[:NAME]", help="The file that builds the module.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many GPUs to plan for.")] = None,
    cluster: Annotated[str, typer.Option(help="Catalogue name or TOML file.")] = DEFAULT_CLUSTER,
    hbm_gib: HbmGib = None,
    gpus_per_node: GpusPerNode = None,
    nics_per_node: NicsPerNode = None,
    nic_gbit_per_second: NicGbit = None,
    intra_node_gb_per_second: IntraNode = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples a step, over all GPUs; else as the model file has them.")
    ] = None,
    precision: Annotated[Precision, typer.Option(help="Number format of matrix products.")] = Precision.FP32,
    optimizer: Annotated[Optimizer, typer.Option(help="Optimizer of the training step.")] = Optimizer.ADAMW,
    is_compiled: Annotated[bool, typer.Option("--compile", help="Same as --stack compiled.")] = False,
    stack: Annotated[str, typer.Option(help="Software stack that the prices are of.")] = "eager",
    arguments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Argument of the model; may be repeated.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="NAME=DTYPE[SIZES]", help="An input: ids=int64[B,1024], B the batch; may be repeated."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="dp=2,tp=2,pp=2", help="Fix the sizes of these axes; the others, cp and ep too, are searched."
        ),
    ] = None,
    microbatch_size: Annotated[int | None, typer.Option(min=1, help="Fix the samples of a microbatch.")] = None,
    batch_shares: Annotated[
        str | None,
        typer.Option(metavar="3,1", help="Fix what part of the batch each dp rank takes: here three quarters and one."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Fix the pipeline schedule: none, sequential, gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v.",
        ),
    ] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Fix how many pipeline stages every rank holds.")
    ] = None,
    zero: Annotated[
        str | None,
        typer.Option(metavar="0|1|2|3", help="Fix the ZeRO stage; 2 and 3 also for some blocks: h.{0..2}=2,*=3."),
    ] = None,
    zero_shard_size: Annotated[
        int | None, typer.Option(min=1, help="Fix over how many ranks (of dp, all of cp) ZeRO-2 or 3 splits.")
    ] = None,
    activation_checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="none|selective|full",
            help="Fix what backward computes again of blocks: nothing, all but products, or all. For some of them: "
            "h.{0..2}=full,h.3=selective.",
        ),
    ] = None,
    may_split_batch: Annotated[
        bool, typer.Option("--tp-may-split-batch", help="Let the tp axis split the batch too.")
    ] = False,
    slow: Annotated[
        list[str] | None, typer.Option(metavar="rank=R:F", help="Rank R takes F times as long; may be repeated.")
    ] = None,
    is_exact: Annotated[bool, typer.Option("--exact", help="Decide all axes jointly; slow.")] = False,
    is_exact_capture: ExactCapture = False,
    time_limit_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop searching after this, with the best plan so far.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder of the package.  [default: ./MODEL-autopar]"),
    ] = None,
    is_forced: Annotated[bool, typer.Option("--force", help="Replace a package that is there already.")] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print plan.json; writes no package without --out.")] = False,
    check: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="Plan again what this plan.json is for; exit with 5 where it is stale."),
    ] = None,
    is_quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and notes on stderr.")] = False,
) -> None:
    """Find the fastest way to train a module on GPUs, and write the sharded module with its launch script.

    autopar plan model.py --gpus 8 --batch-size 64
    """
    if check is not None:
        _check_alone(context)
        _check(check, is_json=is_json, is_quiet=is_quiet)
        return
    if model is None:
        raise AutoparError("no model is given", fix="autopar plan model.py --gpus 8")
    if gpus is None:
        raise AutoparError("the number of GPUs is not given", fix=f"autopar plan {model} --gpus 8")
    set_values = parse_assignments(arguments or (), option="--set")
    input_texts = parse_assignments(inputs or (), option="--input")
    pinned_mesh = parse_mesh(mesh, where=f"--mesh {mesh}") if mesh is not None else {}
    slow_ranks = parse_slow(slow or (), gpus)
    shares = parse_shares(batch_shares, where=f"--batch-shares {batch_shares}") if batch_shares is not None else None
    from ...planner.driver import PlanRequest  # with torch, so after the options are known to be right

    request = PlanRequest(
        model=model,
        arguments=set_values,
        inputs=input_texts,
        gpus=gpus,
        cluster=cluster,
        cluster_overrides=given_overrides(
            hbm_gib=hbm_gib,
            gpus_per_node=gpus_per_node,
            nics_per_node=nics_per_node,
            nic_gbit_per_second=nic_gbit_per_second,
            intra_node_gb_per_second=intra_node_gb_per_second,
        ),
        batch_size=batch_size,
        precision=precision.value,
        optimizer=optimizer.value,
        stack="compiled" if is_compiled else stack,
        mesh=pinned_mesh,
        microbatch_size=microbatch_size,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        zero=pin_of(zero),
        zero_shard_size=zero_shard_size,
        activation_checkpoint=activation_checkpoint,
        tp_may_split_batch=may_split_batch,
        slow_ranks=slow_ranks,
        batch_shares=shares,
        exact=is_exact,
        exact_capture=is_exact_capture,
        time_limit_seconds=time_limit_seconds,
    )
    folder = out or default_folder(model)
    writes = out is not None or not is_json
    assumed = [f"--cluster {cluster}"] if _is_default(context, "cluster") else []
    with progress(is_quiet=is_quiet) as report:
        found, files = _plan_and_write(request, folder if writes else None, report, is_forced=is_forced)
    if batch_size is None:
        assumed.append(f"--batch-size {found.batch_size}")
    if assumed and not is_quiet:
        print_note(f"assumed: {', '.join(assumed)}")
    if is_json:
        print_result(plan_to_json(relative_to(found, folder) if writes else found))
    else:
        _print_plan(found, files, folder)


def _plan_and_write(
    request: PlanRequest, folder: Path | None, report: Progress, *, is_forced: bool
) -> tuple[Plan, tuple[Path, ...]]:
    from ...compiler.package import check_folder, check_stack, emit_package
    from ...planner.driver import make_plan

    if folder is not None:  # before the search, not after
        check_stack(request.stack)
        check_folder(folder, force=is_forced)
    planned = make_plan(request, report)
    if folder is None:
        return planned.plan, ()
    plan = relative_to(planned.plan, folder)
    return planned.plan, emit_package(plan, planned.graph, folder, force=is_forced, progress=report)


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def _check_alone(context: typer.Context) -> None:
    allowed = {"check", "is_json", "is_quiet"}
    given = [name for name in context.params if name not in allowed and not _is_default(context, name)]
    if given:
        options = {p.name: p.opts[0] for p in context.command.params}
        raise AutoparError(
            f"--check takes everything from the plan, but {options[given[0]]} is given too",
            fix="autopar plan --check plan.json",
        )


def _check(file: Path, *, is_json: bool, is_quiet: bool) -> None:
    """Plan again what `file` is for and compare the decision."""
    committed = read_plan(file)
    from ...planner.driver import make_plan
    from ...planner.edits import was_edited
    from ...planner.replay import command_of, request_of

    with progress(is_quiet=is_quiet) as report:
        planned = make_plan(request_of(committed), report)
    fresh = rounded(planned.plan)
    found = diff_plans(committed, fresh)
    if is_json:
        print_result(plan_to_json(replace(fresh, model=committed.model)))
    else:
        print_result(headline(found))
        for table in () if found.is_empty else diff_tables(found):
            print_table(table)
    if not found.is_same_decision and was_edited(committed, planned.graph):
        raise CheckFailed(
            "planning again decides otherwise than the plan, which was edited since the search",
            where=str(file),
            fix=f"to keep it, plan with the edit pinned, leaving out what may be searched: {command_of(committed)}",
        )
    if not found.is_same_decision:
        raise CheckFailed(
            "the plan is stale: planning again decides otherwise",
            where=str(file),
            fix="run `autopar plan` again and commit its plan.json",
        )


def _print_plan(found: Plan, files: tuple[Path, ...], folder: Path) -> None:
    print_result(
        f"Plan:       {summary.decision_line(found)}\n"
        f"For:        {summary.setting_line(found)}\n"
        f"Predicted:  {summary.prediction_line(found)}\n"
        f"Solver:     {summary.solver_line(found)}\n\n"
    )
    for table in (plan_tables.stage_table(found), plan_tables.time_table(found), plan_tables.runner_up_table(found)):
        if table.rows:
            print_table(table)
    for note in found.notes:
        print_result(f"note: {note}")
    if files:
        print_result(f"Written:    {folder}/ ({', '.join(sorted(file.name for file in files))})")
        print_result(f"Next:       autopar verify {shlex.quote(str(folder / 'plan.json'))}")
