"""autopar hardware profile: what it refuses before it measures, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from autopar.compiler import profile
from autopar.cost_models.hardware import load_cluster

TEXT = """description = "a machine"
gpu = "cpu-local"
gpus_per_node = { value = 2, source = "measured" }

[intra_node]
kind = "host"
bus_gb_per_second = { value = 1, source = "measured" }
send_gb_per_second = { value = 1, source = "measured" }
latency_microseconds = { value = 1, source = "measured" }
latency_per_rank_microseconds = { value = 1, source = "measured" }
ramp_microseconds = { value = 0, source = "measured" }
"""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measuring takes no time, and files land in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    document = SimpleNamespace(
        text=lambda: TEXT, description="a machine", source="measured", values=lambda: {"gpu": {"hbm_gib": 4}}
    )

    def answer(*, ranks: int | None, device: str | None, progress: object) -> SimpleNamespace:
        progress(0, 1, "products")  # type: ignore[operator]
        return SimpleNamespace(document=document)

    monkeypatch.setattr(profile, "profile_machine", answer)


@pytest.mark.usefixtures("measured")
def test_a_file_is_written_once(run) -> None:
    first = run("hardware", "profile")
    assert first.code == 0
    assert "wrote measured.toml" in first.err
    assert "a machine" in first.out
    assert load_cluster("measured.toml").gpus_per_node == 2
    again = run("hardware", "profile")
    assert again.code == 2
    assert "exists" in again.err
    assert "--force" in again.err
    assert run("hardware", "profile", "--force", "--quiet").code == 0


@pytest.mark.usefixtures("measured")
def test_json_only_prints(run) -> None:
    found = run("hardware", "profile", "--json")
    assert found.code == 0
    data = json.loads(found.out)
    assert data["path"] is None
    assert data["tables"] == {"gpu": {"hbm_gib": 4}}
    assert not Path("measured.toml").exists()
    written = run("hardware", "profile", "--json", "--out", "mine.toml")
    assert json.loads(written.out)["path"] == "mine.toml"
    assert Path("mine.toml").exists()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("out", "what"),
    [("mine", "no ending .toml"), ("no/such/mine.toml", "does not exist"), ("folder.toml", "is a folder")],
)
def test_what_cannot_be_written(run, out: str, what: str) -> None:
    Path("folder.toml").mkdir()
    found = run("hardware", "profile", "--out", out)
    assert found.code == 2
    assert what in found.err


def test_a_device_that_is_not_there(run, tmp_path: Path) -> None:
    found = run("hardware", "profile", "--device", "tpu", "--out", tmp_path / "x.toml")
    assert found.code == 2
    assert "choose one of: cpu, cuda" in found.err
