"""Checkpointing that differs by block: values, collectives and kept bytes of what is emitted."""

from dataclasses import replace

import pinned
import pytest
from autopar.compiler.package import emit_package
from autopar.compiler.verify import verify
from autopar.compiler.verify.saved import compare_bytes

pytestmark = pytest.mark.gloo


def planned(model, mesh, checkpoint, **pins):
    return pinned.planned(model, mesh, activation_checkpoint=checkpoint, **pins)


def check(folder, model, mesh, checkpoint, **given):
    return pinned.verified(folder, model, mesh, activation_checkpoint=checkpoint, **given)


def recomputed_messages(plan) -> int:
    return sum(line.count for line in plan.collectives if line.reason == "recompute")


def test_a_block_of_dp_is_recomputed_in_full_and_one_but_for_products(tmp_path):
    plan, text = check(tmp_path, "llama", {"dp": 2}, "layers.{0..1}=full,layers.2=selective")
    assert plan.activation_checkpoint == "mixed"
    assert plan.checkpoint_by_block == {"layers.{0..1}": "full", "layers.2": "selective", "layers.3": "none"}
    assert 'FULL = {*(f"layers.{i}" for i in range(2))}' in text
    assert 'SELECTIVE = {"layers.2"}' in text


@pytest.mark.slow
def test_stages_differ_and_repeat_their_collectives(tmp_path):
    pins = {"microbatch_size": 1, "schedule": "1f1b"}
    mesh, mixed = {"pp": 2, "tp": 2}, "layers.{0..1}=full,layers.2=full"
    plan, _ = check(tmp_path, "llama", mesh, mixed, **pins)
    every = planned("llama", mesh, "full", **pins).plan
    if plan.placements == every.placements and [s.first for s in plan.stages] == [s.first for s in every.stages]:
        assert 4 * recomputed_messages(plan) == 3 * recomputed_messages(every) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mesh", "checkpoint", "given"),
    [
        ("llama", {"dp": 2}, "layers.{0..1}=full", {"zero": 3, "microbatch_size": 1}),
        ("llama", {"dp": 2}, "layers.1=full,layers.3=selective", {"zero": 1, "microbatch_size": 1}),
        ("gpt", {"tp": 2}, "h.{1..2}=selective", {}),
        # Middle stages share a class, though one of them recomputes half of its blocks.
        (
            "gpt",
            {"pp": 4},
            "h.{0..1}=full,h.{2..3}=selective,h.4=full",
            {"microbatch_size": 1, "schedule": "1f1b", "arguments": {"num_layers": 8, "context": 16}},
        ),
        (
            "gpt",
            {"pp": 2},
            "h.{0..2}=full,h.6=selective",
            {
                "microbatch_size": 1,
                "schedule": "interleaved",
                "stages_per_rank": 2,
                "arguments": {"num_layers": 8, "context": 16},
            },
        ),
        # Blocks that update running statistics.
        ("resnet", {"dp": 2}, "layers.0.0=full,layers.0.1=selective", {"arguments": {"width": 8}}),
    ],
)
def test_other_mixes(model, mesh, checkpoint, given, tmp_path):
    check(tmp_path, model, mesh, checkpoint, **given)


def test_a_mixed_plan_shrinks_with_its_model(tmp_path):
    made = planned("gpt", {"pp": 2}, "h.{0..1}=full", microbatch_size=2, schedule="gpipe")
    smaller = {"num_layers": 2, "context": 8}
    report = verify(made.plan, tmp_path, shrink=True, arguments=smaller, timeout_seconds=240.0)
    assert report.ok, "\n".join(report.lines())
    assert report.activation_checkpoint == "1 of 2 blocks recomputed in full"


@pytest.mark.parametrize(
    ("model", "mesh", "checkpoint", "given"),
    [
        ("llama", {"dp": 2}, "layers.{0..1}=full,layers.2=selective", {}),
        pytest.param("llama", {"tp": 2}, "layers.1=full", {}, marks=pytest.mark.slow),
        pytest.param("gpt", {"pp": 2}, "h.0=full,h.3=selective", {"schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp": 2}, "layers.{2..3}=full", {"zero": 3}, marks=pytest.mark.slow),
        pytest.param("resnet", {"dp": 2}, "layers.0.0=full", {"arguments": {"width": 8}}, marks=pytest.mark.slow),
    ],
)
def test_predicted_bytes_are_what_ranks_keep(model, mesh, checkpoint, given, tmp_path):
    made = planned(model, mesh, checkpoint, cluster="cpu-local", batch_size=8, **given)
    emit_package(made.plan, made.graph, tmp_path / "package", force=False)
    for stage in compare_bytes(made.plan, tmp_path / "package", made.graph):
        assert stage.predicted == stage.counted


def test_emission_wants_every_block_named(tmp_path):
    made = planned("gpt", {}, "h.0=full")
    for checkpoints, message in (
        ({"h.0": "full", "h.{2..3}": "none"}, "block h.1 has no policy"),
        ({"h.0": "full", "h.{1..4}": "none"}, "there is no block 'h.4'"),
    ):
        with pytest.raises(Exception, match=message):
            emit_package(replace(made.plan, checkpoint_by_block=checkpoints), made.graph, tmp_path / "p", force=False)
