"""The parameters that a stage holds -> seconds of their gradients, FSDP, and the optimizer on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from ...cost_models.communication import overlapped_seconds
from ...cost_models.optimizer import optimizer_seconds
from ..capture.graph import ITEM_BYTES
from ..sharding.mesh import Mesh
from .held_parameters import parameter_bytes
from .holdings import Holdings, num_elements
from .host_seconds import fsdp_hooks, holds_dtensors
from .prices import Prices, accumulated_bytes, gathered_bytes, overlap_slowdown

# Times the bytes of the masters: gradients read in 16 bits and written in 32, parameters the other way; loss scaling
# reads and writes every gradient once more. Source: Float16OptimizerWithFloat16Params of github.com/NVIDIA/Megatron-LM.
_COPIED_PASSES = {"bfloat16": 3, "float16": 5}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSeconds:
    """What `held` parameters (in the dtypes that run) or `stored` ones take under a ZeRO stage."""

    prices: Prices
    optimizer: str

    @property
    def mesh(self) -> Mesh:
        return self.prices.mesh

    def accumulation(self, held: Holdings, zero: int) -> float:
        """Adding one microbatch's gradients to the sum of those before."""
        gpu = self.prices.cluster.gpu
        if self.mesh.microbatches == 1 or (zero >= 2 and self.prices.stack.accumulation == "sharded"):
            return 0.0
        stack = self.prices.stack
        traffic = sum(
            n * num_elements(p) * accumulated_bytes(p.dtype, stack, self.mesh.state_ranks) for p, n in held.trained
        )
        each = gpu.kernel_seconds if gpu.is_host else 0.0
        return traffic / (gpu.hbm_bytes_per_second * gpu.hbm_fraction) + held.num_trained * each

    def _reduced_bytes(self, num_bytes: int, dtype: str) -> int:
        """Bytes of a gradient as it is reduced."""
        if self.prices.stack.gradient_dtype != "compute":
            return num_bytes * max(1, ITEM_BYTES["float32"] // ITEM_BYTES[dtype])
        return num_bytes

    def data_parallel(self, held: Holdings, zero: int, forward: float, backward: float, waited: int = 0) -> float:
        """Exposed seconds a step, over dp and cp together. `forward` and `backward`: compute of one microbatch, behind
        which FSDP hides; but for `waited` gathers of what ZeRO-3 frees, which nothing hides."""
        if self.mesh.state_ranks == 1:
            return 0.0
        if zero <= 1:
            seconds = self._exchange(held) if zero else self._all_reduce(held)
            return self._hidden(seconds, backward) + self._buffer_copies(held, zero)
        return self._fsdp(held, zero, forward, backward, waited)

    def _all_reduce(self, held: Holdings) -> float:
        """One bucket of all gradients of a dtype."""
        sizes: dict[str, int] = {}
        for parameter, count in held.trained:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + count * parameter_bytes(parameter)
        return sum(
            self.prices.use_seconds(self.mesh.state_axis, "all_reduce", self._reduced_bytes(size, dtype))
            for dtype, size in sizes.items()
        )

    def _exchange(self, held: Holdings) -> float:
        """ZeRO-1: gradients are added up into each rank's part, and what it has updated is gathered, by group."""
        axis, ranks, price = self.mesh.state_axis, self.mesh.state_ranks, self.prices.use_seconds
        seconds = sum(n * price(axis, "all_gather", size) for size, n in held.cut_bytes(ranks))
        for size, count in held.group_bytes(ranks, 1, trained=True):
            seconds += count * price(axis, "reduce_scatter", self._reduced_bytes(size, held.trained_dtype))
        return seconds

    def _buffer_copies(self, held: Holdings, zero: int) -> float:
        """Gradients into the buffer that is reduced and back; under ZeRO-1 parameters into and out of theirs too."""
        gpu = self.prices.cluster.gpu
        if self.prices.stack.gradient_buffers != "copied to":
            return 0.0
        gradients = held.trained_bytes
        parameters = sum(n * parameter_bytes(p) for p, n in held.parameters if p.dp_dim(1) is not None)
        moved = gradients + parameters * (1 + 1 / self.mesh.state_ranks) if zero else 2 * gradients
        copies = held.num_trained * (gpu.kernel_seconds if gpu.is_host else 0.0)
        return 2 * moved / (gpu.hbm_bytes_per_second * gpu.hbm_fraction) + copies

    def _hidden(self, seconds: float, backward: float) -> float:
        """What remains of the exchange of whole gradients where a stack hides it behind the last backward."""
        sync = self.prices.stack.gradient_sync
        if sync == "hidden" or (sync == "hidden without tp" and self.mesh.tp == 1):
            return self._exposed(backward, seconds)
        return seconds

    def _fsdp(self, held: Holdings, zero: int, forward: float, backward: float, waited: int) -> float:
        stack, times = self.prices.stack, self.mesh.microbatches
        shards = self.mesh.shards
        price = self.prices.use_seconds
        # What lies outside the blocks stays gathered from a forward to its backward.
        gathers = [
            (price("dp_shard", "all_gather", gathered_bytes(size, stack)), n) for size, n in held.block_bytes(shards)
        ]
        root = price("dp_shard", "all_gather", held.root_bytes(shards))
        scatters: list[tuple[float, int]] = []
        for whole, count in held.group_bytes(shards, trained=True):
            size = self._reduced_bytes(whole, held.trained_dtype)
            reduced = price("dp_shard", "reduce_scatter", size) + price("dp_replicate", "all_reduce", size // shards)
            scatters.append((reduced, count))
        blocks, scatter = (sum(seconds * n for seconds, n in each) for each in (gathers, scatters))
        is_kept = zero == 2 or stack.resharding == "never"
        is_sharded = stack.accumulation == "sharded"
        gathers_each = stack.accumulation != "unsharded"
        kept = blocks
        if not is_kept:
            sizes = held.kept_group_bytes(shards)
            kept = sum(price("dp_shard", "all_gather", gathered_bytes(size, stack)) * n for size, n in sizes)
        freed = blocks - kept
        ahead = kept + (times - waited) * freed + (times if gathers_each and not is_kept else 1) * root
        back = (times if is_sharded else 1) * scatter + (times if gathers_each else 1) * freed
        # Nothing computes while the first group is gathered and the last reduced.
        largest = (max((seconds for seconds, _ in each), default=0.0) for each in ((*gathers, (root, 1)), scatters))
        hides_back = stack.fsdp_overlap == "always" or self.mesh.tp == 1
        exposed_back = self._exposed(backward * (times if gathers_each else 1), back) if hides_back else back
        exposed = self._exposed(forward * (1 if is_kept else times), ahead) + exposed_back + waited * freed
        return max(sum(largest), exposed)

    def _exposed(self, compute: float, communication: float) -> float:
        """What communication beside compute adds to it."""
        slowdown = overlap_slowdown(self.prices.stack)
        hidden = self.prices.cluster.intra_node.hidden_fraction
        return overlapped_seconds(compute, communication, slowdown=slowdown, hidden_fraction=hidden) - compute

    def fsdp_copies(self, held: Holdings, zero: int) -> tuple[float, float]:
        """Copies out of gathered buffers and into reduced ones, forward and backward of one microbatch."""
        stack, gpu = self.prices.stack, self.prices.cluster.gpu
        if zero < 2 or self.mesh.state_ranks == 1 or stack.fsdp == "flat":
            return 0.0, 0.0
        size = held.num_bytes
        reduced = self._reduced_bytes(size, held.parameters[0][0].dtype) if held.parameters else 0
        rate = gpu.hbm_bytes_per_second * gpu.hbm_fraction
        kept = size if zero == 2 or stack.resharding == "never" else held.kept_bytes
        freed = size - kept
        once = 1 / self.mesh.microbatches
        ahead = 2 * kept / rate * once + 2 * freed / rate
        back = (size + reduced) / rate * (1 if stack.accumulation == "sharded" else once)
        back += 2 * freed / rate * (once if stack.accumulation == "unsharded" else 1)
        hooks_ahead, hooks_back = fsdp_hooks(held, gpu)
        return ahead + hooks_ahead, back + hooks_back

    def partial_gradients(self, axis: str, held: Holdings, zero: int) -> float:
        """The bucketed all_reduce of parameters whose gradients are partial sums on ep or tp."""
        shards = self.mesh.shards if zero >= 2 else 1
        partial = sum(n * parameter_bytes(p) for p, n in held.parameters if axis in p.partial)
        return self.prices.use_seconds(axis, "all_reduce", partial // shards) if partial else 0.0

    def optimizer_step(self, held: Holdings, stored: Holdings, zero: int) -> float:
        """The update of what this rank keeps."""
        shards = self.mesh.shards if zero >= 1 else 1
        gpu, size = self.prices.cluster.gpu, stored.trained_bytes // shards
        seconds = optimizer_seconds(
            size,
            gpu,
            optimizer=self.optimizer,
            num_tensors=stored.num_trained,
            sharded=holds_dtensors(self.mesh, zero),
        )
        if self.prices.stack.updates == "copied" and held.trained:
            passes = _COPIED_PASSES.get(held.trained_dtype, 0)
            seconds += passes * size / (gpu.hbm_bytes_per_second * gpu.hbm_fraction)
        return seconds
