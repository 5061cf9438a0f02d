"""Predictions against single measurements that others published."""

from dataclasses import replace

import pytest
from autopar.cost_models.communication import axis_group, collective_seconds
from autopar.cost_models.compute import gemm_seconds
from autopar.cost_models.hardware import load_cluster, load_gpu
from autopar.cost_models.work import Gemm

# Source: github.com/ROCm/xla@333a6949bb xla/service/gpu/model/matmul_interpolator_data.h, H100, bf16, short bursts.
H100_PRODUCTS = [
    ((256, 256, 256, 1), 4.992),
    ((512, 512, 512, 1), 6.16),
    ((1024, 1024, 1024, 1), 8.496),
    ((2048, 2048, 2048, 1), 26.8),
    ((4096, 4096, 4096, 1), 176.16),
    ((512, 256, 512, 2), 6.208),
    ((1024, 512, 1024, 2), 8.768),
    ((2048, 1024, 2048, 2), 26.88),
    ((4096, 2048, 4096, 2), 176.433),
    ((512, 4096, 256, 4), 14.336),
    ((1024, 256, 1024, 4), 9.504),
    ((2048, 512, 2048, 4), 27.04),
    ((4096, 1024, 4096, 4), 177.68),
]

# Source: github.com/EleutherAI/cookbook@827ee3b293 benchmarks/sizing/sample_results/transformer.out, fp16, sustained.
A100_PRODUCTS = [
    ((8192, 12288, 4096), 241.6),
    ((8192, 4096, 4096), 234.9),
    ((8192, 16384, 4096), 241.1),
    ((8192, 4096, 16384), 252.8),
    ((8192, 51200, 4096), 255.4),
]

# Source: nccl-tests all-reduce, ranks, bytes and microseconds. H100: github.com/NVIDIA/dgxc-benchmarking@db1b14c
# nccl/README.md; A100 and V100: VIA-Research/vTrain@f8dda8473a trace; H200 and B200: github.com/stas00/ml-engineering
# @744d01e18b network/README.md.
ALL_REDUCES = [
    ("h100-sxm", 8, 2**16, 19.5),
    ("h100-sxm", 8, 2**24, 123.8),
    ("h100-sxm", 8, 2**30, 4029.4),
    ("h200", 8, 2**30, 4053.4),
    ("b200", 8, 2**34, 35551.4),
    ("a100-80g-sxm", 2, 2**30, 5442.8),
    ("a100-80g-sxm", 4, 2**30, 7259.4),
    ("a100-80g-sxm", 8, 2**26, 579.9),
    ("a100-80g-sxm", 8, 2**30, 8193.0),
    ("v100-32g-sxm2", 2, 2**30, 47610.0),
    ("v100-32g-sxm2", 5, 2**30, 46223.0),
    ("v100-32g-sxm2", 8, 2**30, 13969.0),
]


@pytest.mark.parametrize(("shape", "microseconds"), H100_PRODUCTS)
def test_products_on_h100(shape: tuple[int, int, int, int], microseconds: float) -> None:
    gpu = replace(load_gpu("h100-sxm"), sustained_fraction=1.0)
    gemm = Gemm(*shape)
    memory = gemm.num_elements * 2 / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
    predicted = max(gemm_seconds(gemm, gpu, dtype="bfloat16"), memory)
    assert predicted * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(("shape", "teraflops"), A100_PRODUCTS)
def test_products_on_a100(shape: tuple[int, int, int], teraflops: float) -> None:
    gemm = Gemm(*shape)
    seconds = gemm_seconds(gemm, load_gpu("a100-80g-sxm"), dtype="float16")
    assert gemm.flops / seconds / 1e12 == pytest.approx(teraflops, rel=0.05)


@pytest.mark.parametrize(("name", "ranks", "num_bytes", "microseconds"), ALL_REDUCES)
def test_all_reduces(name: str, ranks: int, num_bytes: int, microseconds: float) -> None:
    cluster = load_cluster(name)
    seconds = collective_seconds("all_reduce", num_bytes, axis_group(ranks, 1, cluster), cluster)
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.15 if num_bytes < 2**28 else 0.05)


def test_a_group_over_two_nodes() -> None:
    """8 GB over 8 A100 on 2 nodes with four 200 Gbit/s NICs: 95.1 GB/s bus bandwidth.

    Source: github.com/NVIDIA/nccl-tests/issues/252.
    """
    cluster = load_cluster("a100-80g-sxm", gpus_per_node=4, nics_per_node=4)
    seconds = collective_seconds("all_reduce", 2**33, axis_group(8, 1, cluster), cluster)
    assert 2 * 7 / 8 * 2**33 / seconds / 1e9 == pytest.approx(95.1, rel=0.05)
