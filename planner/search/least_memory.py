"""Parameters, gradients and optimizer state of a mesh as evenly split as they can be: what any plan must hold, and by
what memory of one plan tells that of others."""

from __future__ import annotations

from dataclasses import dataclass

from ...cost_models.optimizer import get_optimizer
from ...cost_models.stacks import Stack
from ..sharding.mesh import Mesh
from .answer import Candidate, Setting
from .pins import Pins
from .policies import zeros_for

# Tensors of a parameter's size beside the optimizer's, in stored bytes: itself and its gradient, both of which other
# stacks may keep in the compute dtype (half as wide at least), beside masters that are the optimizer's.
_KEPT = {"float32 master": 2.0}
_IN_COMPUTE_DTYPE = 1.0
_OWN_MASTERS = ("float32 master, compute gradients", "float32 master, both gradients")
_GATHERED = 1.5  # whole parameters in the compute dtype and whole gradients, which FSDP2 keeps between microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Sizes of a model's states under an optimizer and a stack, in bytes. `trained_bytes`: parameters as stored."""

    trained_bytes: int
    optimizer: str
    stack: Stack

    def share(self, mesh: Mesh) -> float:
        """The parameters of a rank before ZeRO splits anything."""
        return self.trained_bytes / (mesh.pp * mesh.ep * mesh.tp)

    def held(self, mesh: Mesh, zero: int, shards: int) -> float:
        """Parameters, gradients and optimizer state where ZeRO-2 and 3 split over `shards` ranks."""
        optimizer = get_optimizer(self.optimizer).states * (0.5 if self.stack.states == "compute dtype" else 1.0)
        optimizer += 1.0 if self.stack.states in _OWN_MASTERS else 0.0
        split = shards if zero >= 2 else 1
        updated = shards if zero >= 2 else mesh.state_ranks if zero else 1
        return self.share(mesh) * (_KEPT.get(self.stack.states, _IN_COMPUTE_DTYPE) / split + optimizer / updated)

    def least(self, mesh: Mesh, pins: Pins) -> float:
        """No plan on the mesh has less on its fullest rank; activations and buffers are not counted."""
        shards = pins.zero_shard_size or mesh.state_ranks
        return min(self.held(mesh, zero, shards) for zero in zeros_for(mesh, pins))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of plans like `known`, a priced one, on other meshes: good for the order in which they are tried."""

    known: Candidate
    batch_size: int  # of `known`
    states: States
    overhead_bytes: int

    def num_bytes(self, mesh: Mesh, zero: int, batch_size: int) -> float:
        """Of the fullest rank under full recomputation."""
        fullest = max(self.known.cost.rank_memory, key=lambda memory: memory["total"])
        moving = fullest["activations"] + fullest["temporary"]
        share = _at_once(mesh, batch_size) / _at_once(self.known.mesh, self.batch_size)
        states = self.states
        found = self.overhead_bytes + states.held(mesh, zero, mesh.state_ranks) + moving * share
        if zero >= 2 and mesh.state_ranks > 1 and mesh.microbatches > 1 and states.stack.accumulation == "unsharded":
            found += _GATHERED * states.share(mesh)
        return found


def _at_once(mesh: Mesh, batch_size: int) -> float:
    """Samples that a rank computes at once, parts of one counted as such."""
    return batch_size / (mesh.dp * mesh.microbatches * mesh.cp * mesh.tp)


def states_of(setting: Setting) -> States:
    """The states of the model that a search is asked about."""
    trained = sum(info.type.num_bytes for info in setting.graph.tensors.values() if info.type.requires_grad)
    return States(trained_bytes=trained, optimizer=setting.optimizer, stack=setting.stack)


__all__ = ["Estimate", "States", "states_of"]
