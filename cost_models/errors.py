"""The root of every error a user can meet: what happened, where, and how to fix it."""


class AutoparError(Exception):
    """A fault of the input, not of autopar.

    The tree (exit code of the command line in parentheses):

        AutoparError            (2) bad usage: files, options, pins
        +- HardwareError        (2) unknown or impossible hardware
        +- InfeasibleError      (3) no plan fits; names the binding constraint
        +- UnsupportedModel     (4) the module cannot be captured or sharded
        +- CheckFailed          (5) verify, diff --fail-on or plan --check said no
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class HardwareError(AutoparError):
    """An unknown GPU or cluster, or one that cannot exist."""
