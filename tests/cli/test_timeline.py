"""autopar timeline: step times with and without stragglers, the trace, the page, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from autopar.cli.exit_codes import ExitCode
from autopar.planner.plan import Plan
from autopar.planner.timeline import simulate_plan


def _planned(plan: Plan) -> Plan:
    """With the step time that its stages give: 1F1B of 2 stages and 4 microbatches, (4 + 1) x 30 ms, then 1 ms."""
    stages = tuple(replace(stage, send_seconds=0.0) for stage in plan.stages)
    return replace(plan, stages=stages, step_seconds=0.151)


def test_writes_a_trace_and_a_page(run, write_plan, example_plan, tmp_path):
    found = run("timeline", write_plan(_planned(example_plan)))
    assert found.code == ExitCode.DONE
    assert "as planned: 151 ms" in found.out
    trace = json.loads((tmp_path / "timeline.json").read_text())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    actions = [event["name"] for event in slices if event["cat"] in ("forward", "backward")]
    assert sorted(actions) == sorted(f"{s}{kind}{m}" for s in (0, 1) for kind in "FB" for m in range(4))
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(151_000)
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert names == ["ranks 0 to 3", "ranks 4 to 7"]
    page = (tmp_path / "timeline.html").read_text()
    assert page.count("<rect") == len(slices)
    assert "src=" not in page
    assert "href=" not in page


def test_rows_have_no_gap_and_no_overlap(example_plan):
    plan = replace(_planned(example_plan), step_seconds=0.3)
    stages = tuple(replace(stage, send_seconds=0.002) for stage in plan.stages)
    step = simulate_plan(replace(plan, stages=stages), {0: 1.5})
    assert step.step_seconds > 0.3
    for row in step.rows:
        clock = 0.0
        for item in (item for item in row if item.kind != "send"):
            assert item.start_seconds == pytest.approx(clock)
            clock = item.end_seconds
        assert clock == pytest.approx(step.step_seconds)


def test_dp_ranks_with_their_own_shares_have_rows_of_their_own(example_plan):
    plan = _planned(example_plan)
    shared = replace(plan, batch_shares=(6, 2), dp_paces=((1.0, 1.0), (3.0, 3.0)), step_seconds=0.214)
    step = simulate_plan(shared)
    # The first dp rank: (6 + 1) x 30 ms; the second: (2 + 1) x 90 ms decides, and its 3 ms.
    assert step.ranks == ((0, 1), (2, 3), (4, 5), (6, 7))
    counts = [sum(item.kind == "forward" for item in row) for row in step.rows]
    assert counts == [6, 2, 6, 2]
    scale = 0.214 / 0.273
    ends = [max(item.end_seconds for item in row if item.kind == "backward") / scale for row in step.rows]
    assert ends[0] == pytest.approx(0.210)
    assert ends[1] == pytest.approx(0.270)
    assert [row[-1].end_seconds for row in step.rows] == pytest.approx([0.214] * 4)
    # Of the second dp rank the first stage: 2 x 180 ms, 30 ms of waiting for the other, and 6 ms.
    slower = simulate_plan(shared, {2: 2.0})
    assert slower.step_seconds == pytest.approx(0.396 * scale)


def test_a_slow_rank_slows_its_stage(run, write_plan, example_plan):
    file = write_plan(_planned(example_plan))
    data = json.loads(run("timeline", file, "--slow", "rank=5:2", "--json").out)
    assert data["step_seconds"] == pytest.approx(0.151)
    # The second stage sets the pace: a forward before it, a backward behind it, its own 4 x 60 ms, and 2 ms.
    assert data["slowed_step_seconds"] == pytest.approx(0.010 + 0.240 + 0.020 + 0.002)
    assert data["files"] == []
    both = json.loads(run("timeline", file, "--slow", "rank=5:2", "--slow", "rank=6:1.5", "--json").out)
    assert both["slowed_step_seconds"] == data["slowed_step_seconds"]


@pytest.mark.parametrize("text", ["3:1.3", "rank=x:2", "rank=1:0", "rank=1", "rank=8:2", "rank=1:nan"])
def test_refuses_what_is_no_straggler(run, write_plan, example_plan, text):
    found = run("timeline", write_plan(example_plan), "--slow", text)
    assert found.code == ExitCode.USAGE
    assert "--slow" in found.err


def test_a_folder_that_cannot_be_written(run, write_plan, example_plan, tmp_path):
    (tmp_path / "taken").write_text("")
    found = run("timeline", write_plan(example_plan), "--out", tmp_path / "taken")
    assert found.code == ExitCode.USAGE
    assert "cannot write" in found.err


def test_starts_without_torch(write_plan, example_plan):
    main = "from autopar.cli.main import main; code = main(sys.argv[1:])"
    text = f"import sys; {main}; sys.exit(code or 'torch' in sys.modules)"
    file = write_plan(example_plan)
    done = subprocess.run(
        [sys.executable, "-c", text, "timeline", str(file), "--json"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
