"""ZeRO-2 and ZeRO-3 by block: values and collectives of what is emitted."""

from collections import Counter

import pinned
import pytest
from autopar.compiler.verify import verify
from autopar.planner.errors import AutoparError

pytestmark = pytest.mark.gloo


def planned(model, mesh, zero, *, batch_size=8, **pins):
    return pinned.planned(model, mesh, batch_size=batch_size, zero=zero, **pins)


def check(folder, model, mesh, zero, *, batch_size=8, **given):
    return pinned.verified(folder, model, mesh, batch_size=batch_size, zero=zero, **given)


def gathers(plan) -> int:
    return sum(line.count for line in plan.collectives if line.reason == "fsdp" and line.op == "all_gather")


def test_some_blocks_of_dp_gather_once(tmp_path):
    plan, text = check(tmp_path, "gpt", {"dp": 2}, "h.{2..3}=2,*=3", microbatch_size=4)
    assert (plan.zero, plan.zero_by_block) == (3, {"h.{0..1}": 3, "h.{2..3}": 2})
    assert 'ZERO_2 = {*(f"h.{i}" for i in range(2, 4))}' in text
    assert "reshard_after_forward=name not in ZERO_2" in text
    # Two gather for their forward and their backward, two keep, and so does the root.
    assert gathers(plan) == 2 * 2 + 2 + 1


def test_stages_of_a_pipeline_differ(tmp_path):
    plan, _ = check(tmp_path, "llama", {"dp": 2, "pp": 2}, "layers.0=2,*=3", microbatch_size=2, schedule="1f1b")
    by_stage: Counter[int] = Counter()
    for line in plan.collectives:
        by_stage[line.stage] += line.count if (line.reason, line.op) == ("fsdp", "all_gather") else 0
    assert sum(by_stage.values()) == 3 * (plan.microbatches + 1) + 1 + 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "zero", "given"),
    [
        ("llama", {"dp": 2, "tp": 2}, "layers.{0..1}=2,layers.{2..3}=3", {"activation_checkpoint": "layers.1=full"}),
        ("llama", {"cp": 2}, "layers.3=2,*=3", {"microbatch_size": 4}),
        ("gpt", {"dp": 4}, "h.0=3,*=2", {"zero_shard_size": 2, "microbatch_size": 1}),
        (
            "gpt",
            {"dp": 2, "pp": 2},
            "h.{1..2}=2,h.7=2,*=3",
            {
                "microbatch_size": 1,
                "schedule": "interleaved",
                "stages_per_rank": 2,
                "arguments": {"num_layers": 8, "context": 16},
            },
        ),
    ],
)
def test_other_mixes(model, mesh, zero, given, tmp_path):
    check(tmp_path, model, mesh, zero, **given)


def test_a_mixed_plan_shrinks_with_its_model(tmp_path):
    made = planned("gpt", {"dp": 2}, "h.{0..1}=2,*=3")
    report = verify(made.plan, tmp_path, shrink=True, arguments={"num_layers": 2, "context": 8}, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert "zero=3 but 2 in 1 of 2 blocks" in report.lines()[0]


def test_blocks_that_are_not_there_are_refused():
    with pytest.raises(AutoparError, match="there is no block 'h.9'"):
        planned("gpt", {"dp": 2}, "h.9=2,*=3")
