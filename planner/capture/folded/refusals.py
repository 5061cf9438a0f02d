"""Why something is not recorded, or a block not folded: then the capture does it the long way, and says so."""

from __future__ import annotations


class CannotRecord(Exception):
    """What recording cannot follow, in words for the user: the step is captured with torch.export alone."""


class CannotFold(Exception):
    """Why the calls of one group of blocks cannot share a graph: they are recorded one by one."""

    def __init__(self, group: int, reason: str) -> None:
        super().__init__(reason)
        self.group = group  # number of the group, see `candidates.find_groups`
        self.reason = reason
