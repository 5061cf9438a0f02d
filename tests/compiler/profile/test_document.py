"""A profile's file is one that --cluster takes, with a source for every number; a bad edit of it is refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from autopar.compiler.profile.document import describe
from autopar.cost_models.errors import HardwareError
from autopar.cost_models.hardware import load_cluster

from .measured import measurements

SOURCE = "measured on Some Device, 2 ranks (gloo), torch 2.13.0, 2026-01-31"


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "measured.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("device", "ranks"), [("cpu", 2), ("cpu", 1), ("cuda", 2), ("cuda", 1)])
def test_the_file_loads_with_sources(tmp_path: Path, device: str, ranks: int) -> None:
    document = describe(measurements(device, ranks=ranks), source=SOURCE)
    cluster = load_cluster(_write(tmp_path, document.text()))
    assert cluster.gpus_per_node == ranks
    assert cluster.gpu.is_host == (device == "cpu")
    sources = dict(cluster.sources)
    numbers = re.findall(r"^\w+ = \{ value", document.text(), flags=re.MULTILINE)
    assert len(sources) == len(numbers)
    measured = [text for text in sources.values() if text == SOURCE]
    assert len(measured) > 0.8 * len(sources)
    assert document.text() == describe(measurements(device, ranks=ranks), source=SOURCE).text()


def test_numbers_survive(tmp_path: Path) -> None:
    cluster = load_cluster(_write(tmp_path, describe(measurements("cpu"), source=SOURCE).text()))
    gpu, link = cluster.gpu, cluster.intra_node
    assert gpu.kernel_seconds == pytest.approx(5e-6)
    assert gpu.kernel_backward_seconds == pytest.approx(9e-6)
    assert gpu.transcendental_seconds == pytest.approx(1e-9)
    assert gpu.host.action_seconds == pytest.approx(1e-4)
    assert gpu.updates["adamw"].sharded_tensor_seconds == pytest.approx(4e-4)
    assert gpu.updates["adamw"].bytes_per_second == pytest.approx(1e9)
    assert gpu.rate("float32") == pytest.approx(5e10, rel=0.1)
    curve = link.curve("all_reduce", 2)
    assert curve is not None
    assert curve.at(1 << 16) == pytest.approx(2e-4 + (1 << 16) / 1e9, rel=1e-3)
    assert link.curve("all_reduce", 4) is None
    assert link.hidden_fraction == 0.5


EDITS = [
    (r'(description = ".*")', r"\1\ncolour = 3", "colour is not a known key"),
    (r"gpus_per_node = \{ value = 2", "gpus_per_node = { value = 2.5", "whole number"),
    (r"gpus_per_node = \{ value = 2", "gpus_per_node = { value = -2", "more than 0"),
    (r"float32 = \{ value = [\d.e+-]+", "float32 = { value = nan", "must be a number"),
    (r"float32 = \{", "floot32 = {", "did you mean float"),
    (r"m_overhead = .*", "", "belong together"),
    (r"action_microseconds = \{ value = [\d.]+", 'action_microseconds = { value = "fast"', "must be a number"),
    (r"action_microseconds", "acton_microseconds", "did you mean action_microseconds"),
    (r"\[gpu.updates.adamw\]", "[gpu.updates.adam]", "did you mean adamw"),
    (r"\[intra_node.measured.send.2\]", "[intra_node.measured.sent.2]", "did you mean send"),
    (r"\[intra_node.measured.send.2\]", "[intra_node.measured.send.3]", "no number of ranks from 2 to 2"),
    (r"\[intra_node.measured.send.2\]", "[intra_node.measured.send.two]", "no number of ranks"),
    (r"bytes = \{ value = \[8192, ", "bytes = { value = [", "no curve"),
    (r"bytes = \{ value = \[8192, \d+\]", "bytes = { value = [8192, 8192]", "sizes of a curve rise"),
    (r"hidden_fraction = \{ value = 0.5", "hidden_fraction = { value = 1.5", "at most 1"),
    (r'kind = "host"', 'kind = "hots"', "did you mean host"),
    (r"\[gpu.host\]", "[gpu.hosts]", "did you mean host"),
    (r"\[gpu.host\]", "[gpu]\n[gpu.host]", "not valid TOML"),
    (r"\[intra_node\]", "[intra]", "did you mean intra_node"),
    (r", source = \"[^\"]*\"", "", "must be { value"),
    (r"source = \"[^\"]*\"", 'source = ""', "empty source"),
    (r"hbm_gib = \{ value = [\d.]+", "hbm_gib = { value = 1e308", "at most 1e+06"),
    (r"overhead_gib = \{ value = [\d.]+", "overhead_gib = { value = 100", "leaves no memory"),
]


@pytest.mark.parametrize(("pattern", "replacement", "message"), EDITS)
def test_bad_edits_are_refused(tmp_path: Path, pattern: str, replacement: str, message: str) -> None:
    text = describe(measurements("cpu"), source=SOURCE).text()
    edited, count = re.subn(pattern, replacement, text, count=1)
    assert count == 1
    with pytest.raises(HardwareError) as caught:
        load_cluster(_write(tmp_path, edited))
    assert message in str(caught.value)


def test_the_text_is_toml_whatever_the_device_is_called(tmp_path: Path) -> None:
    data = tomllib.loads(describe(measurements("cpu"), source=SOURCE).text())
    assert '"X"' in data["gpu"]["description"]
