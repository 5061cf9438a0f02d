"""A plan -> what would be decided with more memory, a faster network or a larger batch, by searching again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..cost_models.hardware import Cluster
from ..cost_models.units import BITS_PER_BYTE, GB, GIB, format_seconds
from .driver import PlanRequest, capture, check_request, plan_graph
from .errors import AutoparError
from .plan import Plan
from .replay import request_of
from .summary import decision_line

_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change; `plan` is None where the changed problem has none, for the reason in `refusal`."""

    change: str
    plan: Plan | None
    refusal: str = ""

    def sentence(self, old: Plan) -> str:
        """What the change does, in words."""
        if self.plan is None:
            return f"With {self.change}: no plan, {self.refusal}."
        new = self.plan
        is_same = decision_line(new) == decision_line(old)
        decision = "the same decision" if is_same else decision_line(new)
        rate = (new.batch_size / new.step_seconds) / (old.batch_size / old.step_seconds)
        more = f"{rate - 1:+.1%} samples/s" if abs(rate - 1) >= 5e-4 else "no more samples/s"
        return f"With {self.change}: {decision}; {format_seconds(new.step_seconds)} a step, {more}."


def what_if(plan: Plan, progress: Callable[[str], None] | None = None) -> tuple[WhatIf, ...]:
    """Search again under each change. Pins stay.

    Raises:
        AutoparError: the model or the cluster of the plan is not there.
        UnsupportedModel: the model cannot be captured.
    """
    say = progress or (lambda text: None)
    request = request_of(plan)
    cluster = check_request(request)
    say("capturing the model")
    graph, named = capture(request)
    found = []
    for change, changed in _hardware(request, cluster):
        say(f"planning with {change}")
        pins = replace(named, cluster_overrides=changed.cluster_overrides)
        found.append(_planned(change, lambda pins=pins: plan_graph(graph, pins, check_request(pins)).plan))
    larger = replace(request, batch_size=plan.batch_size * _FACTOR)
    change = f"a batch of {larger.batch_size}"
    say(f"planning with {change}")
    found.append(_planned(change, lambda: plan_graph(*capture(larger), cluster).plan))
    return tuple(found)


def _planned(change: str, make: Callable[[], Plan]) -> WhatIf:
    try:
        return WhatIf(change=change, plan=make())
    except AutoparError as error:
        return WhatIf(change=change, plan=None, refusal=str(error.what))


def _hardware(request: PlanRequest, cluster: Cluster) -> Iterator[tuple[str, PlanRequest]]:
    """More memory, then the faster of what the plan's ranks are connected by."""
    memory = cluster.gpu.hbm_bytes / GIB * _FACTOR
    yield f"{memory:g} GiB a GPU", _with(request, "hbm_gib", memory)
    network = cluster.inter_node
    if network is not None and request.gpus > cluster.gpus_per_node:
        rate = network.nic_bytes_per_second * BITS_PER_BYTE / GB * _FACTOR
        yield f"a network of {rate:g} Gbit/s a card", _with(request, "nic_gbit_per_second", rate)
    elif request.gpus > 1:
        rate = cluster.intra_node.bytes_per_second / GB * _FACTOR
        yield f"links of {rate:g} GB/s inside a node", _with(request, "intra_node_gb_per_second", rate)


def _with(request: PlanRequest, name: str, value: float) -> PlanRequest:
    return replace(request, cluster_overrides={**request.cluster_overrides, name: value})
