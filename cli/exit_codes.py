"""What the exit code of `autopar` means."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Errors carry their own code (`AutoparError.exit_code`); an exception that is none of them is 1, our bug."""

    DONE = 0
    BUG = 1
    USAGE = 2
    INFEASIBLE = 3
    UNSUPPORTED = 4
    CHECK_FAILED = 5
    INTERRUPTED = 130  # as shells have it: 128 and the signal's number
    UNREAD = 141  # as shells have it too, of SIGPIPE: what reads stdout has ended
