"""The flat graph of a training step, with its training flags: recorded where possible, exported otherwise.

A recording (`folded/`) takes time for each distinct block; `torch.export` for every operation. Both give the same
graph; where recording cannot follow the step, export does, and a note says why.
"""

from __future__ import annotations

from ..errors import UnsupportedModel
from .constants import NeedsValues
from .export import exported_graph
from .export_guards import quiet, recording_training_reads
from .flat import FlatGraph
from .folded.refusals import CannotRecord
from .modes import flags_by_calls, flags_by_graphs
from .step import Traceable


def step_graph(what: Traceable, *, is_exact: bool) -> tuple[FlatGraph, tuple[str, ...]]:
    """Capture a step, with notes. `is_exact`: by torch.export alone.

    Raises:
        NeedsValues: constants have no values on meta, or autocast acts on real devices only.
        UnsupportedModel: the step cannot be captured.
    """
    what.step.train()
    with recording_training_reads() as reads:
        train, notes = _traced(what, is_exact=is_exact)
    if not reads:
        return train, notes
    if what.on_meta:
        with quiet():
            flagged = flags_by_calls(what.step, list(what.tensors.values()), train)
        if flagged is not None:
            return flagged, notes
    what.step.eval()
    try:
        evaluation, _ = _traced(what, is_exact=is_exact)
    except NeedsValues:
        raise
    except UnsupportedModel as error:
        return train, (*notes, f"eval mode cannot be captured: {error.what}")
    finally:
        what.step.train()
    graph, more = flags_by_graphs(train, evaluation)
    return graph, (*notes, *more)


def _traced(what: Traceable, *, is_exact: bool) -> tuple[FlatGraph, tuple[str, ...]]:
    if is_exact:
        return exported_graph(what), ("captured by torch.export, operation by operation, as asked for",)
    try:
        from .folded.capture import recorded_graph

        return recorded_graph(what)
    except CannotRecord as error:
        reason = str(error)
    except ImportError as error:
        reason = f"a release of PyTorch without {error.name}"
    return exported_graph(what), (f"captured by torch.export, operation by operation: recording met {reason}",)
