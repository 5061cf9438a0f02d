"""The parameters and units of a stage -> bytes by component on one of its ranks, at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from ...cost_models.memory import COMPUTE_BYTES, Memory, overhead_bytes, state_bytes
from ..capture.graph import ITEM_BYTES
from .held_parameters import shard_bytes
from .holdings import Holdings
from .prices import Prices

# Of the buckets of gradients and of parameters. Source: defaults of deepspeed.ai/docs/config-json.
_BUCKET_ELEMENTS = 500_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of stages under one optimizer and precision."""

    prices: Prices
    optimizer: str
    precision: str

    def without_activations(
        self,
        working_bytes: int,
        held: Holdings,
        stored: Holdings,
        zero: int,
    ) -> Memory:
        """Peak bytes without activations and overhead. `working_bytes`: of the unit that works with most.

        Under ZeRO-3 FSDP2 holds the parameters of the block that works, of the one fetched ahead, and of the root,
        which is not resharded until its backward ends (torch 2.13, by groups that are unsharded or on their way).
        Under ZeRO with several microbatches FSDP2 keeps gathered parameters and unreduced gradients until the last
        backward; with one only those of the groups at work.
        """
        dp = self.prices.mesh.shards  # all ranks of dp and cp under ZeRO-1
        shards = dp if zero >= 2 else 1
        frozen = sum(n * shard_bytes(p, shards, 0) for p, n in stored.parameters if not p.trainable)
        memory = state_bytes(
            stored.trained_bytes,
            zero=zero,
            dp=dp,
            optimizer=self.optimizer,
            precision=self.precision,
            largest_unit_bytes=_largest(stored.group_bytes(1)),
            kept_bytes=stored.root_bytes(1) + sum(size * count for size, count in stored.kept_group_bytes(1)),
            largest_freed_bytes=stored.freed.largest_block_bytes(1),
            shard_bytes=self._shard_bytes(stored, zero),
            frozen_bytes=frozen,
        )
        memory = self._as_kept(memory, zero)
        if zero == 1 and dp > 1:
            # The parts of a group, padded, and the buffer that they are put into.
            size = _largest(held.group_bytes(dp, 1))
            if self.prices.stack.zero_1 == "buckets":
                size = min(_BUCKET_ELEMENTS * COMPUTE_BYTES[self.precision], held.num_bytes)
            memory = replace(memory, gather_buffers=2 * size)
        if zero >= 2 and dp > 1:
            whole = self.held_whole_bytes(held, zero)
            if self._accumulates_apart:
                # Fullest before the last backward: the parameters at work, and no gradient is in its shards yet.
                working = min(2 * _largest(held.group_bytes(dp)), held.num_bytes)
                memory = replace(memory, gather_buffers=working + whole, gradients=0)
            else:
                memory = replace(memory, gather_buffers=max(memory.gather_buffers, whole))
        return memory + Memory(temporary=working_bytes)

    def held_per_byte(self, zero: int) -> float:
        """Bytes that stay for each of a trained parameter as stored, in even shards; without what FSDP2 gathers."""
        shards = self.prices.mesh.shards
        size = shards << 30
        memory = state_bytes(size, zero=zero, dp=shards, optimizer=self.optimizer, precision=self.precision)
        memory = self._as_kept(memory, zero)
        gradients = 0 if zero >= 2 and self._accumulates_apart else memory.gradients
        return (memory.parameters + gradients + memory.optimizer + memory.master_weights) / size

    @property
    def _accumulates_apart(self) -> bool:
        """Whether gradients are whole, and in no shards, until the last backward, though parameters are freed."""
        return self.prices.mesh.shards > 1 and self.keeps_gradients and not self.keeps_parameters

    @property
    def frees_parameters(self) -> bool:
        """Whether ZeRO-3 holds less than ZeRO-2 does."""
        return self.prices.mesh.shards > 1 and not (self.keeps_parameters or self.keeps_gradients)

    @property
    def keeps_gradients(self) -> bool:
        """Whether FSDP2's gradients stay whole from one microbatch to the next."""
        return self.prices.mesh.microbatches > 1 and self.prices.stack.accumulation != "sharded"

    @property
    def keeps_parameters(self) -> bool:
        """Whether what FSDP2 has gathered stays from one microbatch to the next."""
        stack = self.prices.stack
        accumulates = self.prices.mesh.microbatches > 1 and stack.accumulation == "unsharded"
        return accumulates or stack.resharding == "never"

    def held_whole_bytes(self, held: Holdings, zero: int) -> int:
        """Gathered parameters and unreduced gradients that FSDP2 holds from one microbatch to the next."""
        dp = self.prices.mesh.shards
        if zero < 2 or dp == 1:
            return 0
        whole = _all(held.group_bytes(dp)) if self.keeps_parameters else 0
        if self.keeps_gradients:
            whole += _all(held.group_bytes(dp, trained=True)) * self._accumulated_items(held)
        return whole

    def _accumulated_items(self, held: Holdings) -> int:
        """How many times larger than a parameter its whole gradient is that microbatches are added up in."""
        if self.prices.stack.gradient_dtype != "float32" or not held.trained:
            return 1
        return max(1, ITEM_BYTES["float32"] // ITEM_BYTES[held.trained_dtype])

    def _shard_bytes(self, stored: Holdings, zero: int) -> int | None:
        """What ZeRO leaves of trained parameters on the first rank, the fullest: each is cut by itself; flat buffers
        are even."""
        if self.prices.stack.fsdp == "flat":
            return None
        dp = self.prices.mesh.shards
        return sum(n * shard_bytes(p, dp, 0, zero) for p, n in stored.trained)

    def with_saved(self, memory: Memory, saved_bytes: int) -> Memory:
        """With what autograd keeps of all microbatches."""
        return replace(memory, activations=saved_bytes)

    def of_rank(self, stages: Sequence[Memory], zero: int) -> dict[str, int]:
        """Bytes by component of the stages of a rank together."""
        memory = self.together(stages, zero)
        memory += overhead_bytes(memory, self.prices.cluster.gpu)
        return memory.by_component()

    def together(self, stages: Sequence[Memory], zero: int) -> Memory:
        """The stages of a rank, without overhead.

        They compute in turn, so scratch is that of the largest. FSDP2's gathered parameters and unreduced gradients are
        those of all of them: the schedule gathers a stage ahead and reduces it behind its last microbatch. Buckets of
        ZeRO-1 are used in turn.
        """
        memory = stages[0]
        if len(stages) > 1:
            memory = replace(sum(stages[1:], memory), temporary=max(stage.temporary for stage in stages))
            if zero < 2:
                memory = replace(memory, gather_buffers=max(stage.gather_buffers for stage in stages))
        return memory

    def _as_kept(self, memory: Memory, zero: int) -> Memory:
        """States in the dtypes that the stack keeps them in.

        The emitted ZeRO-1 stores float32 parameters whole. Masters that are the optimizer's own are cut with its state.
        """
        states = self.prices.stack.states
        share = COMPUTE_BYTES[self.precision] / COMPUTE_BYTES["fp32"]
        if states == "float32 master" or share == 1:
            return memory
        if zero == 1 and states != "compute dtype":
            memory = replace(memory, master_weights=ceil(memory.master_weights / self.prices.mesh.shards))
        if states == "float32 master, both gradients":
            return replace(memory, gradients=int(memory.gradients * (1 + share)))
        lower = replace(memory, gradients=int(memory.gradients * share))
        if states != "compute dtype":
            return lower
        # Parameters are stored as they compute: no masters, and what was gathered is no second copy.
        stored = int(memory.master_weights * share)
        return replace(
            lower,
            parameters=max(memory.parameters, stored),
            master_weights=0,
            optimizer=int(memory.optimizer * share),
        )


def _largest(groups: Sequence[tuple[int, int]]) -> int:
    return max((size for size, _ in groups), default=0)


def _all(groups: Sequence[tuple[int, int]]) -> int:
    return sum(size * count for size, count in groups)
