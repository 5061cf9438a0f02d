"""A setup -> predicted seconds and bytes, by the evaluator that `autopar plan` prices its candidates with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from autopar.cost_models.errors import AutoparError
from autopar.planner.capture.graph import ModelGraph
from autopar.planner.checkpointing import Checkpointing
from autopar.planner.errors import CannotLower
from autopar.planner.search.assignment import NoAssignment
from autopar.planner.search.evaluate import Evaluated, Evaluator
from autopar.planner.search.prices import Prices, in_precision
from autopar.planner.search.shared import Shared
from autopar.planner.sharding.mesh import Mesh
from autopar.planner.sharding.program import Placements

from .models import Shape, captured, deepened, with_batch
from .pins import batch_placements, tensor_placements
from .setups import CannotExpress, Setup

# What PyTorch's allocator holds beside the tensors of the peak, as nvidia-smi shows. Source: fits published runs of
# PyTorch whose memory was read so (BLOOM and its 1.3B forerunner).
_CACHED_FRACTION = 0.22
_EMBEDDING, _NORM_AND_HEAD = 1, 2  # layers beside the blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`spread_percent`: how much slower the worst of the allowed microbatch sizes and interleavings would be."""

    seconds: float
    memory_bytes: int
    fits: bool
    microbatch: int
    interleave: int
    spread_percent: float
    cost: Evaluated


@dataclass
class Predictor:
    """Captures and solves each structure once; after that a prediction is arithmetic."""

    _batch: dict[tuple[object, ...], Placements] = field(default_factory=dict)
    _tensor: dict[tuple[object, ...], Placements] = field(default_factory=dict)
    _graphs: dict[tuple[object, ...], tuple[ModelGraph, ModelGraph]] = field(default_factory=dict)
    _shared: dict[tuple[object, ...], Shared] = field(default_factory=dict)

    def pinned(self) -> Predictor:
        """One that knows the placements of this one, and no prices."""
        return Predictor(_batch=dict(self._batch), _tensor=dict(self._tensor))

    def predict(self, setup: Setup) -> Prediction:
        """The best of what the row leaves open.

        Raises:
            CannotExpress: the configuration cannot be priced.
        """
        found: list[tuple[Evaluated, int, int]] = []
        reason = ""
        for size, interleave in product(setup.microbatch_sizes, setup.interleaves):
            try:
                found.append((self._evaluate(setup, size, interleave), size, interleave))
            except (CannotExpress, CannotLower, NoAssignment, AutoparError) as error:
                reason = str(error)
        if not found:
            raise CannotExpress(reason or "no microbatch size divides the batch")
        room = setup.cluster.gpu.hbm_bytes
        fitting = [each for each in found if each[0].memory_bytes <= room]
        allowed = fitting or found
        cost, size, interleave = min(allowed, key=lambda each: each[0].step_seconds)
        slowest = max(each[0].step_seconds for each in allowed)
        return Prediction(
            seconds=cost.step_seconds,
            memory_bytes=_measured_bytes(cost, setup.memory),
            fits=bool(fitting),
            microbatch=size,
            interleave=interleave,
            spread_percent=100 * (slowest / cost.step_seconds - 1),
            cost=cost,
        )

    def _evaluate(self, setup: Setup, size: int, interleave: int) -> Evaluated:
        count = round(setup.global_batch / (setup.dp * size))
        if count < 1:
            raise CannotExpress(f"microbatches of {size} on dp={setup.dp} are more than the batch")
        mesh = Mesh(pp=setup.pp, dp=setup.dp, tp=setup.tp, microbatches=count, replicas=setup.replicas)
        placements = self._placements(setup)
        graph, lowered = self._graphs_of(setup, placements, setup.dp * size * count)
        evaluator = Evaluator(
            graph=lowered,
            master=graph,
            placements=placements,
            prices=Prices(mesh=mesh, cluster=setup.cluster, stack=setup.stack, shared=self._known(setup)),
            optimizer="adamw",
            precision=setup.precision,
        )
        return evaluator.evaluate(
            stages_of(graph, setup.layers, setup.pp * interleave, dealt=setup.dealt),
            schedule=_schedule(setup, interleave, count),
            zero=setup.zero,
            activation_checkpoint=checkpointing_of(setup.policy, graph),
        )

    def _known(self, setup: Setup) -> Shared:
        """What earlier predictions for this cluster and stack have worked out."""
        return self._shared.setdefault((setup.cluster, setup.stack), Shared())

    def _graphs_of(self, setup: Setup, placements: Placements, batch_size: int) -> tuple[ModelGraph, ModelGraph]:
        """The graph in its stored dtypes and in those that run."""
        key = (setup.shape, setup.layers, batch_size, setup.precision)
        if key not in self._graphs:
            batched = with_batch(captured(setup.shape), placements, batch_size)
            stored = deepened(batched, setup.layers)
            self._graphs[key] = stored, in_precision(stored, setup.precision)
        return self._graphs[key]

    def _placements(self, setup: Setup) -> Placements:
        structure = _structure(setup.shape)
        if structure not in self._batch:
            self._batch[structure] = batch_placements(captured(setup.shape), cluster=setup.cluster, stack=setup.stack)
        batch = self._batch[structure]
        if setup.tp == 1:
            return batch
        key = (structure, setup.tp, setup.sequence_parallel, setup.stack.loss_logits, setup.stack.embedding)
        if key not in self._tensor:
            self._tensor[key] = tensor_placements(
                captured(setup.shape),
                batch,
                cluster=setup.cluster,
                stack=setup.stack,
                precision=setup.precision,
                tp=setup.tp,
                width=setup.width,
                sequence_parallel=setup.sequence_parallel,
            )
        return self._tensor[key]


def _schedule(setup: Setup, interleave: int, microbatches: int) -> str:
    """1F1B without as many microbatches as stages is all forwards, then all backwards."""
    if interleave > 1:
        return "interleaved"
    if setup.schedule == "1f1b" and microbatches < setup.pp:
        return "gpipe" if microbatches > 1 else "sequential"
    return setup.schedule


def _measured_bytes(cost: Evaluated, kind: str) -> int:
    """What a source's memory column would show; `kind` as in `Software`. nvidia-smi is read on the first rank."""
    if kind in ("cached", "planned"):
        first = cost.rank_memory[0]
        cached = (first["total"] - first["overhead"]) * _CACHED_FRACTION if kind == "cached" else 0.0
        return first["total"] + int(cached)
    return max(memory["total"] - memory["overhead"] for memory in cost.rank_memory)


def _structure(shape: Shape) -> tuple[object, ...]:
    """Equal for shapes whose graphs differ in sizes only."""
    given = dict(shape.arguments)
    heads, groups = given.get("num_heads"), given.get("num_kv_heads")
    grouped = bool(groups) and groups != heads
    return (
        shape.file,
        grouped,
        groups if grouped else None,
        given.get("bias"),
        bool(given.get("dropout")),
        given.get("tied"),
    )


def checkpointing_of(policy: str, graph: ModelGraph) -> Checkpointing:
    """The policy by unit where a run has "alternate", every second block in full, or "most", all but every fifth."""
    runs_again = {"alternate": lambda number: number % 2 == 0, "most": lambda number: number % 5 != 4}.get(policy)
    if runs_again is None:
        return policy
    numbers: Counter[int] = Counter()
    found: list[str] = []
    for unit in graph.units:
        found.append("full" if runs_again(numbers[unit.template]) else "none")
        numbers[unit.template] += 1
    return tuple(found)


def stages_of(graph: ModelGraph, layers: int, count: int, *, dealt: str = "blocks") -> tuple[tuple[int, int], ...]:
    """Equal numbers of blocks on every stage. Where they do not divide, embedding and head count as blocks; where that
    does not divide either, the first stages have one more. `dealt`: as in `Software`.

    Raises:
        CannotExpress: fewer blocks than stages.
    """
    last = len(graph.units)
    counts = graph.counts()
    block = max(range(len(counts)), key=lambda t: counts[t])
    start = next(i for i, unit in enumerate(graph.units) if unit.template == block)
    if dealt == "layers":
        whole = layers + _EMBEDDING + _NORM_AND_HEAD
        sizes = [whole // count + (i < whole % count) for i in range(count)]
        sizes[0] -= _EMBEDDING
        sizes[-1] -= _NORM_AND_HEAD
        if min(sizes) < 1:
            raise CannotExpress(f"{layers} blocks on {count} stages")
    elif layers % count == 0:
        sizes = [layers // count] * count
    elif (layers + 2) % count == 0 and (layers + 2) // count > 1:
        sizes = [(layers + 2) // count] * count
        sizes[0] -= 1
        sizes[-1] -= 1
    elif layers > count:
        sizes = [layers // count + (i < layers % count) for i in range(count)]
    else:
        raise CannotExpress(f"{layers} blocks on {count} stages")
    ends = [start + sum(sizes[: i + 1]) for i in range(count)]
    ends[-1] = last
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


__all__ = ["Prediction", "Predictor", "checkpointing_of", "stages_of"]
