"""Commands that read plans, hardware and rules: diff, explain, hardware, ops."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autopar.cli.exit_codes import ExitCode
from autopar.compiler.verify.report import CollectiveMismatch, RankFailure, VerifyReport
from autopar.cost_models.hardware import catalogue
from autopar.planner.plan import Plan

Run = Callable[..., Any]
Write = Callable[..., Path]


def slower(plan: Plan) -> Plan:
    return replace(plan, step_seconds=plan.step_seconds * 1.5, mesh={"pp": 2, "dp": 4, "tp": 1})


def test_diff_of_a_plan_with_itself(run: Run, write_plan: Write, example_plan: Plan) -> None:
    file = write_plan(example_plan)
    found = run("diff", file, file, "--fail-on", "step_time>0%,memory>0%,mesh,tensors")
    assert (found.code, found.out) == (ExitCode.DONE, "The plans are the same.\n")


def test_diff_on_the_terminal(run: Run, write_plan: Write, example_plan: Plan) -> None:
    found = run("diff", write_plan(example_plan), write_plan(slower(example_plan), "new.json"))
    assert found.code == ExitCode.DONE
    assert "The decision differs; predicted step time +50.0%." in found.out
    assert "mesh tp" in found.out
    assert "225 ms" in found.out


def test_diff_fails_on(run: Run, write_plan: Write, example_plan: Plan) -> None:
    files = write_plan(example_plan), write_plan(slower(example_plan), "new.json")
    found = run("diff", *files, "--format", "markdown", "--fail-on", "step_time>5%,memory>2%,mesh")
    assert found.code == ExitCode.CHECK_FAILED
    assert found.out.startswith("### autopar: `")
    assert "step_time: +50.0%, limit +5%; mesh: 2 changes" in found.err
    assert "memory" not in found.err


def test_diff_fail_on_is_read_before_the_files(run: Run) -> None:
    found = run("diff", "a.json", "b.json", "--fail-on", "speed")
    assert found.code == ExitCode.USAGE
    assert "unknown name 'speed'" in found.err


def test_diff_json(run: Run, write_plan: Write, example_plan: Plan) -> None:
    files = write_plan(example_plan), write_plan(slower(example_plan), "new.json")
    data = json.loads(run("diff", *files, "--json").out)
    assert [c["name"] for c in data["settings"]] == ["dp", "tp"]


def test_bad_plan_is_named(run: Run, write_plan: Write, example_plan: Plan) -> None:
    file = write_plan(example_plan)
    file.write_text(file.read_text().replace('"zero": 2', '"zero": 7', 1))
    found = run("explain", file)
    assert found.code == ExitCode.USAGE
    assert found.err == f"error: $.zero is 7\n  where: {file}\n  fix: use one of 0, 1, 2, 3\n"


def test_explain(run: Run, write_plan: Write, example_plan: Plan) -> None:
    found = run("explain", write_plan(example_plan))
    assert found.code == ExitCode.DONE
    assert found.out.startswith("pp=2 dp=2 tp=2, 4 microbatches of 2 samples, schedule 1f1b, ZeRO-2")
    for text in (
        "wte h.{0..3}",
        "8 GiB (10%)",
        "The largest part of the step is compute: 67%.",
        "The pipeline bubble takes 20% of the step with 4 microbatches",
        "dp=8 (dp only) is predicted 20.0% slower",
        "tp=8 (tp only) does not fit: it needs 90 GiB, 10 GiB too much.",
        "search complete; no plan is faster than 140 ms, a gap of 7.0%; 40 candidates, 3 programs solved",
        "1.20x",
    ):
        assert text in found.out


def test_explain_json(run: Run, write_plan: Write, example_plan: Plan) -> None:
    data = json.loads(run("explain", write_plan(example_plan), "--json").out)
    assert len(data["explanations"]) == 6


def test_names_in_brackets_are_no_markup(run: Run, write_plan: Write, example_plan: Plan) -> None:
    stage = replace(example_plan.stages[0], fqns=("[red]h[/red]",))
    found = run("explain", write_plan(replace(example_plan, stages=(stage, example_plan.stages[1]))))
    assert "[red]h[/red]" in found.out


def test_hardware_show(run: Run) -> None:
    found = run("hardware", "show", "h100-sxm")
    assert found.code == ExitCode.DONE
    assert "989 TFLOP/s" in found.out or "bfloat16" in found.out
    assert "Sources of the GPU" in found.out
    data = json.loads(run("hardware", "show", "h100-sxm", "--json").out)
    assert data["gpus_per_node"] == 8


def test_hardware_show_of_nodes_that_differ(run: Run, tmp_path: Path) -> None:
    lines = (Path(catalogue.__file__).with_name("clusters") / "h100-sxm.toml").read_text().splitlines()
    groups = '[[groups]]\ngpu = "h100-sxm"\nnodes = 2\n[[groups]]\ngpu = "a100-80g-sxm"\nnodes = 1\ngpus_per_node = 4'
    measured = '[intra_node.measured.all_reduce.2]\nbytes = { value = [1, 2], source = "s" }\n'
    measured += 'microseconds = { value = [1, 2], source = "s" }'
    file = tmp_path / "mixed.toml"
    file.write_text("\n".join([*(line for line in lines if not line.startswith("gpu =")), measured, groups]))
    found = run("hardware", "show", file)
    assert found.code == ExitCode.DONE
    for text in ("2 nodes of 8 h100-sxm", "1 nodes of 4 a100-80g-sxm", "GPU a100-80g-sxm", "all_reduce of 2 ranks"):
        assert text in found.out
    assert json.loads(run("hardware", "show", file, "--json").out)["groups"][1]["gpus_per_node"] == 4


def test_unknown_hardware_names_the_nearest(run: Run) -> None:
    found = run("hardware", "show", "h100-smx")
    assert found.code == ExitCode.USAGE
    assert "h100-sxm" in found.err


def test_ops(run: Run) -> None:
    names = run("ops").out.split()
    assert names == sorted(names)
    assert json.loads(run("ops", "--json").out)["ops"] == names
    assert run("ops", "linear").out.split() == [name for name in names if "linear" in name]


def test_ops_without_an_entry_are_found_by_name(run: Run) -> None:
    for name in ("aten.tanh", "aten.tanh.default"):
        assert run("ops", name).out == "aten.tanh.default\n"
    assert run("ops", "tanh").out.splitlines() == ["aten.rnn_tanh.input", "aten.tanh.default"]


@pytest.mark.parametrize(("text", "near"), [("linaer", "aten.linear.default"), ("aten.sofmax.int", "aten.softmax.int")])
def test_unknown_operations_name_the_nearest(run: Run, text: str, near: str) -> None:
    for options in ((), ("--json",)):
        found = run("ops", text, *options)
        assert (found.code, found.out) == (ExitCode.USAGE, "")
        assert text in found.err
        assert near in found.err
    assert "lists them all" in run("ops", "no such text").err


def test_hardware_with_facts_of_the_user(run: Run) -> None:
    found = run("hardware", "show", "h100-sxm", "--hbm-gib", "64", "--nic-gbit-per-second", "200", "--json")
    data = json.loads(found.out)
    assert data["gpu"]["hbm_bytes"] == 64 * 2**30
    assert data["inter_node"]["nic_bytes_per_second"] == 25e9
    assert ["hbm_gib", "given by the user"] in data["sources"]


def test_explain_against_another_plan(run: Run, write_plan: Write, example_plan: Plan) -> None:
    other = replace(example_plan, step_seconds=0.3, time_breakdown_seconds={"compute": 0.3})
    found = run("explain", write_plan(example_plan), "--against", write_plan(other, "pinned.json"), "--json")
    assert "100.0% slower: compute +200 ms" in json.loads(found.out)["explanations"][-1]


@pytest.mark.parametrize(("traceback", "said"), [("", "--timeout-seconds"), ("Traceback ...", "does not do what")])
def test_a_rank_that_is_late_is_no_difference(
    run: Run, write_plan: Write, example_plan: Plan, monkeypatch: pytest.MonkeyPatch, traceback: str, said: str
) -> None:
    report = VerifyReport(
        mesh={"dp": 2}, microbatches=1, schedule="none", zero=0, activation_checkpoint="none", dtype="float64",
        tolerance=1e-9, seconds=1.0, num_values=0, worst={},
        failure=RankFailure(rank=0, error="no answer from rank 0, 1 within 1 seconds", traceback=traceback),
    )  # fmt: skip
    monkeypatch.setattr("autopar.compiler.verify.verify", lambda *arguments, **options: report)
    found = run("verify", write_plan(example_plan), "--shrink", "--quiet")
    assert found.code == ExitCode.CHECK_FAILED
    assert "no answer from rank 0, 1" in found.out
    assert said in found.err


def test_other_collectives_are_no_other_values(
    run: Run, write_plan: Write, example_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = CollectiveMismatch(rank=0, axis="dp", op="all_reduce", num_bytes=64, planned=1, recorded=0)
    report = VerifyReport(
        mesh={"dp": 2}, microbatches=1, schedule="none", zero=2, activation_checkpoint="none", dtype="float64",
        tolerance=1e-9, seconds=1.0, num_values=4, worst={"loss": 0.0}, mismatches=(other,),
    )  # fmt: skip
    monkeypatch.setattr("autopar.compiler.verify.verify", lambda *arguments, **options: report)
    found = run("verify", write_plan(example_plan), "--shrink", "--quiet")
    assert found.code == ExitCode.CHECK_FAILED
    assert "all values are those of the original" in found.err
