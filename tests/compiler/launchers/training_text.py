"""The emitted files of training for a plan of a few facts."""

from types import SimpleNamespace

from autopar.compiler.launchers.torchrun import render_training


def rendered(*, is_fused=False, **changes):
    facts = {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "gpus": 8,
        "cluster": "h100-sxm",
        "batch_size": 16,
        "batch_shares": (),
        "microbatches": 2,
        "optimizer": "adamw",
        "precision": "fp32",
        "cluster_overrides": {},
        "schedule": "1f1b",
        "zero": 0,
        "model": SimpleNamespace(path="../gpt.py", name="build", arguments={"preset": "tiny", "dropout": 0.1}),
    }
    inputs = (SimpleNamespace(name="ids", batch_dim=0), SimpleNamespace(name="scale", batch_dim=None))
    plan, graph = SimpleNamespace(**{**facts, **changes}), SimpleNamespace(name="gpt", inputs=inputs)
    return render_training(plan, graph, is_fused=is_fused)
