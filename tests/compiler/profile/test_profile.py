"""This machine is measured, and a model planned for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from autopar.compiler.profile import profile_machine, timing
from autopar.compiler.profile.messages import group_sizes
from autopar.compiler.profile.profile import _run
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


class Late(Stopwatch):
    """A device like a GPU: what is launched runs while the host waits."""

    __slots__ = ()
    queue: list[Callable[[], object]] = []

    def wait(self) -> None:
        while self.queue:
            self.queue.pop(0)()


def launched(seconds: float) -> Callable[[], object]:
    return lambda: Late.queue.append(lambda: time.sleep(seconds))


@pytest.mark.gloo
def test_a_short_phase_waits_for_slow_ranks() -> None:
    for _ in range(3):
        name, multiprocessors = _run("cpu", 4, "device", None)
        assert name
        assert multiprocessors == 1


def test_a_device_runs_behind_the_host() -> None:
    watch = Late(device="cuda")
    assert watch.once(launched(0.01)) >= 0.01
    assert watch.once(launched(0.01), on_host=True) < 0.005
    assert not Late.queue  # what was launched does not meet what is timed next
    assert watch.seconds(launched(0.002), blocks=3) >= 0.002


def test_few_blocks_of_long_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_LONG_SECONDS", 0.004)
    runs = []
    Late(device="cuda").seconds(lambda: runs.append(launched(0.002)()))
    assert len(runs) == 2 + timing._FEWEST_BLOCKS


def test_a_backward_starts_from_any_gradient() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    ahead, back = Stopwatch(device="cpu").both_ways(lambda: x * 3.0, times=2)
    assert ahead > 0
    assert back > 0
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4, 4), 4 * 9.0))


def test_copies_leave_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (40 << 18,)  # 40 MiB: two are more than 64 MiB, one is not
    copies = timing.cold_copies(shape, "cpu")
    assert next(copies).data_ptr() != next(copies).data_ptr()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=126 << 20))
    assert timing._cold_bytes("cuda") == 252 << 20
    assert timing._cold_bytes("cpu") == 64 << 20
