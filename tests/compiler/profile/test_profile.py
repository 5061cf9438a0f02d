"""This machine is measured, and a model planned for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from autopar.compiler.profile import profile_machine
from autopar.compiler.profile.messages import group_sizes
from autopar.compiler.profile.timing import Stopwatch, lower_quartile
from autopar.cost_models.errors import AutoparError
from autopar.cost_models.hardware import load_cluster


@pytest.mark.slow
@pytest.mark.gloo
def test_this_machine(tmp_path: Path) -> None:
    phases: list[str] = []
    profiled = profile_machine(ranks=2, device="cpu", progress=lambda done, total, what: phases.append(what))
    path = tmp_path / "measured.toml"
    path.write_text(profiled.document.text())
    cluster = load_cluster(str(path))
    gpu = cluster.gpu
    assert phases[-1] == "done"
    assert 1e9 < gpu.rate("float32") < 1e13
    assert gpu.rate("float64") < 1.5 * gpu.rate("float32")
    assert 1e-7 < gpu.kernel_seconds < 1e-3
    assert gpu.updates["adamw"].sharded_tensor_seconds > gpu.updates["adamw"].tensor_seconds
    assert gpu.host.fsdp_group_forward_seconds > 0
    assert gpu.host.action_seconds > 0
    small, large = (cluster.intra_node.curve("all_reduce", 2).at(size) for size in (256, 1 << 23))
    assert small < large


@pytest.mark.parametrize(
    ("ranks", "device", "what"),
    [(0, "cpu", "0 ranks"), (2, "tpu", "no device 'tpu'"), (4096, "cuda", "GPU")],
)
def test_what_the_machine_lacks(ranks: int, device: str, what: str) -> None:
    with pytest.raises(AutoparError, match=what):
        profile_machine(ranks=ranks, device=device)


def test_groups_are_powers_of_two_and_all() -> None:
    assert group_sizes(2) == (2,)
    assert group_sizes(6) == (2, 4, 6)
    assert group_sizes(8) == (2, 4, 8)


def test_a_stopwatch_counts_its_own_work() -> None:
    watch = Stopwatch(device="cpu")
    short, long = (watch.seconds(lambda n=n: sum(range(n)), blocks=4) for n in (1_000, 20_000))
    assert long > 5 * short
    assert lower_quartile([4.0]) == 4.0
    assert lower_quartile([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
