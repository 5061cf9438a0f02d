"""A plan read from a file -> what it was made from: the request, and the graph of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import AutoparError
from .plan import Plan

if TYPE_CHECKING:
    from .capture.graph import ModelGraph
    from .driver import PlanRequest


def request_of(plan: Plan) -> PlanRequest:
    """The request that a plan answers, with what the user pinned.

    Raises:
        AutoparError: a pin that this autopar does not know.
    """
    from .driver import PlanRequest

    return PlanRequest(
        model=f"{plan.model.path}:{plan.model.name}",
        arguments=plan.model.arguments,
        inputs=plan.model.inputs,
        gpus=plan.gpus,
        cluster=plan.cluster,
        batch_size=plan.batch_size,
        precision=plan.precision,
        optimizer=plan.optimizer,
        stack=plan.stack,
        **_pins(plan),
    )


def graph_of(plan: Plan) -> ModelGraph:
    """Capture the model of a plan again.

    Raises:
        AutoparError: the model is gone or cannot be captured.
    """
    from .capture import capture_model

    source = plan.model
    return capture_model(
        source.path, name=source.name, arguments=source.arguments, inputs=source.inputs, batch_size=plan.batch_size
    ).graph
