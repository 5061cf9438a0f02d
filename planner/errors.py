"""Errors of planning and of the compiler; the tree of those that users meet is drawn at `AutoparError`."""

from ..cost_models.errors import AutoparError


class InfeasibleError(AutoparError):
    """No plan satisfies the constraints: names the binding one, the gap and the nearest change that fits."""

    exit_code = 3


class UnsupportedModel(AutoparError):
    """The module cannot be captured, or an operation cannot be sharded or repeated safely."""

    exit_code = 4


class CheckFailed(AutoparError):
    """A requested check (verify, diff --fail-on, plan --check) found a difference."""

    exit_code = 5


class CannotLower(Exception):
    """A labelling that a mesh cannot have: a split that does not divide, or a change of layout that does not exist.

    Inside the search another labelling is tried; where placements come from a plan, it is an `UnsupportedModel`.
    """
