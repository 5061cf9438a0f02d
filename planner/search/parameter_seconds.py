"""The parameters that a stage holds -> seconds of their gradients, FSDP, and the optimizer on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...cost_models.communication import OVERLAP_SLOWDOWN, OVERLAP_SLOWDOWN_COMPILED, overlapped_seconds
from ...cost_models.optimizer import optimizer_seconds
from ..capture.graph import ITEM_BYTES
from ..sharding.mesh import Mesh
from .held_parameters import HeldParameter, padded_bytes, parameter_bytes
from .host_seconds import fsdp_hooks, holds_dtensors
from .prices import Prices, accumulated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSeconds:
    """What `held` parameters (in the dtypes that run) or `stored` ones take under a ZeRO stage."""

    prices: Prices
    optimizer: str

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    def accumulation(self, held: Sequence[HeldParameter], zero: int) -> float:
        """Adding one microbatch's gradients to the sum of those before."""
        gpu = self.prices.cluster.gpu
        if self.mesh.microbatches == 1 or (zero >= 2 and self.prices.stack.accumulation == "sharded"):
            return 0.0
        stack, trained = self.prices.stack, [parameter for parameter in held if parameter.trainable]
        traffic = sum(num_elements(parameter) * accumulated_bytes(parameter.dtype, stack) for parameter in trained)
        each = gpu.kernel_seconds if gpu.is_host else 0.0
        return traffic / (gpu.hbm_bytes_per_second * gpu.hbm_fraction) + len(trained) * each

    def _reduced_bytes(self, num_bytes: int, dtype: str) -> int:
        """Bytes of a gradient as it is reduced."""
        if self.prices.stack.gradient_dtype == "float32":
            return num_bytes * max(1, ITEM_BYTES["float32"] // ITEM_BYTES[dtype])
        return num_bytes

    def data_parallel(self, held: Sequence[HeldParameter], zero: int, forward: float, backward: float) -> float:
        """Exposed seconds a step. `forward` and `backward`: compute of one microbatch, behind which FSDP hides."""
        if self.mesh.dp == 1:
            return 0.0
        trainable = [parameter for parameter in held if parameter.trainable]
        if zero <= 1:
            seconds = self._exchange(held, trainable) if zero else self._all_reduce(trainable)
            return self._hidden(seconds, backward) + self._buffer_copies(held, trainable, zero)
        return self._fsdp(held, trainable, zero, forward, backward)

    def _all_reduce(self, trainable: Sequence[HeldParameter]) -> float:
        """One bucket of all gradients of a dtype."""
        sizes: dict[str, int] = {}
        for parameter in trainable:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter_bytes(parameter)
        return sum(
            self.prices.use_seconds("dp", "all_reduce", self._reduced_bytes(size, dtype))
            for dtype, size in sizes.items()
        )

    def _exchange(self, held: Sequence[HeldParameter], trainable: Sequence[HeldParameter]) -> float:
        """ZeRO-1: gradients are added up into each rank's part, and what it has updated is gathered, by group."""
        dp, price = self.mesh.dp, self.prices.use_seconds
        cut = [parameter for parameter in held if parameter.dp_dim(1) is not None]
        seconds = sum(price("dp", "all_gather", size) for size in bytes_by_group(cut, dp, zero=1).values())
        for size in bytes_by_group(trainable, dp, zero=1).values():
            seconds += price("dp", "reduce_scatter", self._reduced_bytes(size, trainable[0].dtype))
        return seconds

    def _buffer_copies(self, held: Sequence[HeldParameter], trainable: Sequence[HeldParameter], zero: int) -> float:
        """Gradients into the buffer that is reduced and back; under ZeRO-1 parameters into and out of theirs too."""
        gpu = self.prices.cluster.gpu
        if self.prices.stack.gradient_buffers != "copied to":
            return 0.0
        gradients = sum(map(parameter_bytes, trainable))
        parameters = sum(parameter_bytes(parameter) for parameter in held if parameter.dp_dim(1) is not None)
        moved = gradients + parameters * (1 + 1 / self.mesh.dp) if zero else 2 * gradients
        copies = len(trainable) * (gpu.kernel_seconds if gpu.is_host else 0.0)
        return 2 * moved / (gpu.hbm_bytes_per_second * gpu.hbm_fraction) + copies

    def _hidden(self, seconds: float, backward: float) -> float:
        """What remains of the exchange of whole gradients where a stack hides it behind the last backward."""
        sync = self.prices.stack.gradient_sync
        if sync == "hidden" or (sync == "hidden without tp" and self.mesh.tp == 1):
            return self._exposed(backward, seconds)
        return seconds

    def _fsdp(
        self,
        held: Sequence[HeldParameter],
        trainable: Sequence[HeldParameter],
        zero: int,
        forward: float,
        backward: float,
    ) -> float:
        stack, times = self.prices.stack, self.mesh.microbatches
        shards = self.mesh.shards
        price = self.prices.use_seconds
        gathers = [price("dp_shard", "all_gather", size) for size in bytes_by_group(held, shards).values()]
        scattered = {
            group: self._reduced_bytes(size, trainable[0].dtype)
            for group, size in bytes_by_group(trainable, shards).items()
        }
        scatters = [
            price("dp_shard", "reduce_scatter", size) + price("dp_replicate", "all_reduce", size // shards)
            for size in scattered.values()
        ]
        gather, scatter = sum(gathers), sum(scatters)
        is_kept = zero == 2 or stack.resharding == "never"
        is_sharded = stack.accumulation == "sharded"
        ahead = gather if is_kept else times * gather
        back = (times if is_sharded else 1) * (scatter if is_kept else gather + scatter)
        if stack.fsdp_overlap == "without tp" and self.mesh.tp > 1:
            return ahead + back
        # Nothing computes while the first group is gathered and the last reduced.
        never_hidden = max(gathers, default=0.0) + max(scatters, default=0.0)
        hiding_ahead = forward * (times if ahead > gather else 1)
        hiding_back = backward * (times if stack.accumulation == "sharded" else 1)
        return max(never_hidden, self._exposed(hiding_ahead, ahead) + self._exposed(hiding_back, back))

    def _exposed(self, compute: float, communication: float) -> float:
        """What communication beside compute adds to it."""
        compiled = self.prices.stack.fusion == "compiled"
        slowdown = OVERLAP_SLOWDOWN_COMPILED if compiled else OVERLAP_SLOWDOWN
        hidden = self.prices.cluster.intra_node.hidden_fraction
        return overlapped_seconds(compute, communication, slowdown=slowdown, hidden_fraction=hidden) - compute

    def fsdp_copies(self, held: Sequence[HeldParameter], zero: int) -> tuple[float, float]:
        """Copies out of gathered buffers and into reduced ones, forward and backward of one microbatch."""
        stack, gpu = self.prices.stack, self.prices.cluster.gpu
        if zero < 2 or self.mesh.dp == 1 or stack.fsdp == "flat":
            return 0.0, 0.0
        size = sum(map(parameter_bytes, held))
        reduced = self._reduced_bytes(size, held[0].dtype) if held else 0
        rate = gpu.hbm_bytes_per_second * gpu.hbm_fraction
        is_kept = zero == 2 or stack.resharding == "never"
        times = 1 if stack.accumulation == "sharded" else 1 / self.mesh.microbatches
        ahead = 2 * size / rate * (1 / self.mesh.microbatches if is_kept else 1)
        back = (size + reduced) / rate * times
        hooks_ahead, hooks_back = fsdp_hooks(held, gpu)
        return ahead + hooks_ahead, (back if is_kept else back + 2 * size / rate * times) + hooks_back

    def partial_gradients(self, axis: str, held: Sequence[HeldParameter], zero: int) -> float:
        """The bucketed all_reduce of parameters whose gradients are partial sums on ep, cp or tp."""
        shards = self.mesh.shards if zero >= 2 else 1
        partial = sum(parameter_bytes(p) for p in held if axis in p.partial)
        return self.prices.use_seconds(axis, "all_reduce", partial // shards) if partial else 0.0

    def optimizer_step(self, stored: Sequence[HeldParameter], zero: int) -> float:
        """The update of what this rank keeps."""
        shards = self.mesh.shards if zero >= 1 else 1
        size = sum(parameter_bytes(parameter) for parameter in stored if parameter.trainable) // shards
        tensors = sum(parameter.trainable for parameter in stored)
        return optimizer_seconds(
            size,
            self.prices.cluster.gpu,
            optimizer=self.optimizer,
            num_tensors=tensors,
            sharded=holds_dtensors(self.mesh, zero),
        )


def num_elements(parameter: HeldParameter) -> int:
    """Elements on one rank, before dp shards them."""
    count = 1
    for size in parameter.shape:
        count *= size
    return count


def bytes_by_group(held: Sequence[HeldParameter], dp: int, zero: int = 2) -> dict[str, int]:
    """Bytes of each group that ZeRO exchanges at once, its parameters padded to equal shards over dp."""
    sizes: dict[str, int] = {}
    for parameter in held:
        sizes[parameter.group] = sizes.get(parameter.group, 0) + padded_bytes(parameter, dp, zero)
    return sizes
