import math
import re
from pathlib import Path

import pytest
from autopar.cost_models.errors import HardwareError
from autopar.cost_models.hardware import catalogue, cluster_names, cut_to, gpu_names, load_cluster, load_gpu

GPU = """
description = "test"
hbm_gib = { value = 10, source = "test" }
hbm_gb_per_second = { value = 1000, source = "test" }
hbm_fraction = { value = 0.9, source = "test" }
sm_count = { value = 10, source = "test" }
sustained_fraction = { value = 0.9, source = "test" }
launch_microseconds = { value = 5, source = "test" }
kernel_microseconds = { value = 2, source = "test" }
overhead_gib = { value = 1, source = "mine" }
[peak_tflops]
float64 = { value = 1, source = "test" }
float32 = { value = 2, source = "test" }
[gemm]
rate_fraction = { value = 0.9, source = "test" }
start_microseconds = { value = 5, source = "test" }
k_overhead = { value = 100, source = "test" }
tile_penalty = { value = 0.3, source = "test" }
[attention]
peak_fraction = { value = 0.4, source = "test" }
short_keys = { value = 1000, source = "test" }
backward_fraction = { value = 0.7, source = "test" }
[sources]
mine = "measured on a test"
"""
CLUSTER = """
description = "test"
gpu = "gpu.toml"
gpus_per_node = { value = 4, source = "test" }
[intra_node]
kind = "pcie"
bus_gb_per_second = { value = 20, source = "test" }
bus_gb_per_second_by_ranks = { value = [10, 15, 20], source = "test" }
send_gb_per_second = { value = 20, source = "test" }
latency_microseconds = { value = 10, source = "test" }
latency_per_rank_microseconds = { value = 1, source = "test" }
ramp_microseconds = { value = 5, source = "test" }
[inter_node]
nics_per_node = { value = 2, source = "test" }
nic_gbit_per_second = { value = 100, source = "test" }
efficiency_fraction = { value = 0.9, source = "test" }
send_fraction = { value = 0.7, source = "test" }
latency_microseconds = { value = 20, source = "test" }
oversubscription = { value = 2, source = "test" }
"""


def write(folder: Path, *, gpu: str = GPU, cluster: str = CLUSTER) -> str:
    (folder / "gpu.toml").write_text(gpu)
    (folder / "mine.toml").write_text(cluster)
    return str(folder / "mine.toml")


def test_a_cluster_of_the_users_own(tmp_path: Path) -> None:
    cluster = load_cluster(write(tmp_path))
    assert cluster.name == "mine"
    assert cluster.gpu.hbm_bytes == 10 * 2**30
    assert cluster.gpu.hbm_bytes_per_second == 1e12
    assert dict(cluster.gpu.sources)["overhead_gib"] == "measured on a test"
    assert cluster.inter_node is not None
    assert cluster.inter_node.node_bytes_per_second == 2 * 100e9 / 8 / 2
    assert [cluster.intra_node.bus(n) for n in (2, 3, 4)] == [10e9, 15e9, 20e9]


def test_a_gpu_may_stand_in_the_cluster_file(tmp_path: Path) -> None:
    inline = GPU.replace('[sources]\nmine = "measured on a test"\n', "").replace("\n[", "\n[gpu.")
    path = tmp_path / "one.toml"
    path.write_text(CLUSTER.replace('gpu = "gpu.toml"\n', "") + "[gpu]" + inline)
    assert load_cluster(str(path)).gpu.sm_count == 10


@pytest.mark.parametrize("name", cluster_names())
def test_every_cluster_loads_and_is_plausible(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster is load_cluster(name)
    assert cluster.gpu.overhead_bytes < cluster.gpu.hbm_bytes
    rates = cluster.gpu.peak_flops_per_second
    if cluster.intra_node.kind != "host":
        assert rates["float64"] <= rates["float32"] <= rates["float16"]
    assert all(rates[wide] <= rates[narrow] for wide, narrow in [("bfloat16", "float8"), ("tf32", "bfloat16")]
               if wide in rates and narrow in rates)  # fmt: skip
    assert all(source.strip() for _, source in (*cluster.sources, *cluster.gpu.sources))
    assert cluster.intra_node.bus(2) > 0


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_loads(name: str) -> None:
    assert load_gpu(name).name == name


def test_the_first_clusters_are_there() -> None:
    assert {"h100-sxm", "a100-80g-sxm", "cpu-local"} <= set(cluster_names())


def test_overrides() -> None:
    cluster = load_cluster("h100-sxm", hbm_gib=40, nic_gbit_per_second=100, nics_per_node=2, gpus_per_node=4)
    assert cluster.gpu.hbm_bytes == 40 * 2**30
    assert cluster.gpus_per_node == 4
    assert cluster.inter_node is not None
    assert cluster.inter_node.node_bytes_per_second == 2 * 100e9 / 8
    assert load_cluster("h100-sxm", intra_node_gb_per_second=50).intra_node.bus(8) == 50e9
    assert load_cluster("h100-sxm").gpu.hbm_bytes > 40 * 2**30
    assert ("hbm_gib", "given by the user") in cluster.sources


@pytest.mark.parametrize(
    "override",
    [{"hbm_gib": -1}, {"hbm_gib": 0.1}, {"nic_gbit_per_second": 0}, {"hbm_gib": math.inf}, {"sustained_fraction": 2}],
)
def test_nonsensical_overrides(override: dict[str, float]) -> None:
    with pytest.raises(HardwareError, match=next(iter(override))):
        load_cluster("h100-sxm", **override)


def test_boards_stay_whole() -> None:
    assert load_cluster("h100-nvl", gpus_per_node=4).gpus_per_node == 4
    with pytest.raises(HardwareError, match="boards of 2"):
        load_cluster("h100-nvl", gpus_per_node=5)


def test_no_network_to_override() -> None:
    with pytest.raises(HardwareError, match="no network"):
        load_cluster("cpu-local", nic_gbit_per_second=10)


@pytest.mark.parametrize(
    ("name", "hint"), [("h100-sxn", "h100-sxm"), ("H100-SXM", "h100-sxm"), ("zzz", "choose one of")]
)
def test_unknown_names_list_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_cluster(name)
    assert hint in str(caught.value)
    assert name in caught.value.what


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=re.escape(str(tmp_path / "no.toml"))):
        load_cluster(str(tmp_path / "no.toml"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hbm_gib = { value = 10", "hbm_gib = { value = -10", "hbm_gib is -10"),
        ("hbm_gib = { value = 10", "hbm_gib = { value = nan", "hbm_gib must be a number"),
        ("hbm_gib = { value = 10", "hbm_gib = { value = true", "hbm_gib must be a number"),
        ("hbm_gib = { value = 10", "hbm_gib = { value = 0.5", "overhead_gib leaves no memory"),
        ("hbm_fraction = { value = 0.9", "hbm_fraction = { value = 1.9", "hbm_fraction is 1.9"),
        ("sm_count = { value = 10", "sm_count = { value = 10.5", "whole number"),
        ('sm_count = { value = 10, source = "test" }', "sm_count = 10", "sm_count must be"),
        ('sm_count = { value = 10, source = "test" }', 'sm_count = { value = 10, source = "" }', "empty source"),
        ('sm_count = { value = 10, source = "test" }', "", "sm_count is missing"),
        ("sm_count", "sm_cuont", "sm_cuont is not a known key"),
        ("float32 =", "float23 =", "float23 is not a known key"),
        ("[gemm]", "[gem]", "gem is not a known key"),
        ("[sources]", "[sources", "not valid TOML"),
    ],
)  # fmt: skip
def test_nonsense_in_a_gpu_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GPU
    with pytest.raises(HardwareError) as caught:
        load_cluster(write(tmp_path, gpu=GPU.replace(old, new, 1)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('kind = "pcie"', 'kind = "swich"', "did you mean switch"),
        ("[10, 15, 20]", "[10, 15]", "give one for each of 2..4 ranks"),
        ("[10, 15, 20]", "[10, 0, 20]", "bus_gb_per_second_by_ranks is 0"),
        ("oversubscription = { value = 2", "oversubscription = { value = 0.5", "at least 1"),
        ("gpus_per_node = { value = 4", "gpus_per_node = { value = 0", "gpus_per_node is 0"),
        ('gpu = "gpu.toml"', 'gpu = "h100-xsm"', "did you mean h100-sxm"),
        ('gpu = "gpu.toml"', "", "gpu is missing"),
        ("[inter_node]", "[inter_nod]", "did you mean inter_node"),
    ],
)  # fmt: skip
def test_nonsense_in_a_cluster_file(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CLUSTER
    with pytest.raises(HardwareError) as caught:
        load_cluster(write(tmp_path, cluster=CLUSTER.replace(old, new, 1)))
    assert message in str(caught.value)


def test_impossible_numbers_of_gpus() -> None:
    cluster = load_cluster("h100-sxm")
    for gpus in (1, 3, 8, 16, 1024):
        cluster.check_gpus(gpus)
    with pytest.raises(HardwareError, match="do not fill nodes") as caught:
        cluster.check_gpus(12)
    assert "8 or 16" in str(caught.value)
    with pytest.raises(HardwareError, match="positive"):
        cluster.check_gpus(0)
    with pytest.raises(HardwareError, match="one node"):
        load_cluster("cpu-local").check_gpus(128)


def test_a_rate_that_a_device_lacks() -> None:
    with pytest.raises(HardwareError, match="a100-80g-sxm has no float8"):
        load_gpu("a100-80g-sxm").rate("float8")


def test_gpu_without_a_cluster_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"clusters": ("h100-sxm",), "gpus": ("h100-sxm", "l4")}
    monkeypatch.setattr(catalogue, "_names", names.__getitem__)
    load_cluster.cache_clear()
    with pytest.raises(HardwareError, match="l4 is a GPU") as caught:
        load_cluster("l4")
    assert 'gpu = "l4"' in str(caught.value.fix)


GROUPS = '[[groups]]\ngpu = "a100-80g-sxm"\nnodes = 1\n[[groups]]\ngpu = "h100-sxm"\nnodes = 2\n'


def grouped(folder: Path, groups: str = GROUPS) -> str:
    """A cluster file with these groups in place of its GPU."""
    file = Path(catalogue.__file__).parent / "clusters" / "h100-sxm.toml"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("gpu =")]
    file = folder / "mixed.toml"
    file.write_text("\n".join([*lines, groups]))
    return str(file)


def test_nodes_of_several_kinds(tmp_path: Path) -> None:
    cluster = load_cluster(grouped(tmp_path), hbm_gib=40)
    assert cluster.gpu.name == "h100-sxm"
    assert [cluster.gpu_of_rank(rank).name for rank in (0, 7, 8, 23)] == ["a100-80g-sxm"] * 2 + ["h100-sxm"] * 2
    assert {group.gpu.hbm_bytes for group in cluster.groups} == {40 * 2**30}
    cluster.check_gpus(24)
    with pytest.raises(HardwareError, match="has 24 GPUs; 32 are asked for"):
        cluster.check_gpus(32)


UNEVEN = GROUPS + '[[groups]]\ngpu = "a100-80g-sxm"\nnodes = 2\ngpus_per_node = 4\n'


def test_nodes_of_several_sizes(tmp_path: Path) -> None:
    cluster = load_cluster(grouped(tmp_path, UNEVEN))
    assert cluster.node_sizes == (8, 8, 8, 4, 4)
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 23, 24, 27, 28, 31)] == [0, 0, 1, 2, 3, 3, 4, 4]
    assert [cluster.gpu_of_rank(rank).name for rank in (0, 8, 23, 24)] == [
        "a100-80g-sxm",
        *["h100-sxm"] * 2,
        "a100-80g-sxm",
    ]
    assert [gpu.name for gpu in cluster.gpus_of(range(4, 28))] == [
        "a100-80g-sxm", "h100-sxm", "h100-sxm", "a100-80g-sxm",
    ]  # fmt: skip
    assert (cluster.common_gpus, cluster.num_nodes(28), cluster.num_nodes(6)) == (4, 4, 1)
    for gpus in (1, 6, 8, 16, 24, 28, 32):
        cluster.check_gpus(gpus)
    with pytest.raises(HardwareError, match="26 GPUs do not fill nodes of 8, 8, 8, 4, 4") as caught:
        cluster.check_gpus(26)
    assert "24 or 28" in caught.value.fix
    with pytest.raises(HardwareError, match="has 32 GPUs"):
        cluster.check_gpus(36)
    assert cut_to(cluster, 28).node_sizes == (8, 8, 8, 4)
    assert cut_to(cluster, 16).node_sizes == ()
    with pytest.raises(HardwareError, match="have different numbers"):
        load_cluster(grouped(tmp_path, UNEVEN), gpus_per_node=4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gpus_per_node = 4", "gpus_per_node = 0", r"groups\[2\].gpus_per_node is 0"),
        ("gpus_per_node = 4", "gpus_per_node = 16", "gpus_per_node is 8, and the largest node has 16.*write 16"),
    ],
)
def test_nonsense_in_sizes_of_nodes(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_cluster(grouped(tmp_path, UNEVEN.replace(old, new)))
    assert re.search(message, f"{caught.value.what} {caught.value.fix}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nodes = 1", "nodes = 0", r"groups\[0\].nodes is 0"),
        ("nodes = 2", "count = 2", r"groups\[1\].count is not a known key"),
        ('gpu = "h100-sxm"', 'gpu = "h100-sxn"', "did you mean h100-sxm"),
    ],
)
def test_nonsense_in_groups(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(HardwareError) as caught:
        load_cluster(grouped(tmp_path, GROUPS.replace(old, new)))
    assert re.search(message, f"{caught.value.what} {caught.value.fix}")
