"""What one operation does on one rank in one microbatch. Works add up: the cost of a graph is a sum."""

from __future__ import annotations

from dataclasses import dataclass

FLOPS_PER_MULTIPLY_ADD = 2


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` matrix products of (m, k) by (k, n)."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        return FLOPS_PER_MULTIPLY_ADD * self.batch * self.m * self.n * self.k

    @property
    def num_elements(self) -> int:
        """Elements of both operands and the result."""
        return self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One direction (forward or backward) of one or more operations.

    `gemms` run on the matrix units; `flops` are all other arithmetic; `bytes` is the traffic to HBM of an eager run
    (each operation reads its operands and writes its results once), products included; `kernels` counts launches.
    `attention_flops` is work inside a fused attention kernel (not in `flops`), causal skipping already applied;
    `attention_bytes` is that kernel's part of `bytes`: all of it where a pass of attention alone leaves it out.
    `transcendentals` counts exponentials, logarithms and the like, which no GPU but every CPU core feels.
    """

    gemms: tuple[Gemm, ...] = ()
    flops: int = 0
    bytes: int = 0
    attention_flops: int = 0
    kernels: int = 0
    attention_bytes: int = 0
    transcendentals: int = 0

    def __post_init__(self) -> None:
        if self.attention_flops and not self.attention_bytes:
            object.__setattr__(self, "attention_bytes", self.bytes)

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            gemms=self.gemms + other.gemms,
            flops=self.flops + other.flops,
            bytes=self.bytes + other.bytes,
            attention_flops=self.attention_flops + other.attention_flops,
            kernels=self.kernels + other.kernels,
            attention_bytes=self.attention_bytes + other.attention_bytes,
            transcendentals=self.transcendentals + other.transcendentals,
        )

    @property
    def total_flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms) + self.flops + self.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Forward and backward of an operation, on local shapes. `dtype` chooses the GEMM rate."""

    forward: Pass = Pass()
    backward: Pass = Pass()
    dtype: str = "float32"

    def __add__(self, other: Work) -> Work:
        return Work(forward=self.forward + other.forward, backward=self.backward + other.backward, dtype=self.dtype)

    @staticmethod
    def zero() -> Work:
        return Work()
