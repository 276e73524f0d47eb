"""Exit codes of the `kite` command."""

from enum import IntEnum

from kite.errors import KiteError, Unreachable, UsageError


class Exit(IntEnum):
    """What the shell is told; scripts rely on these numbers."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DIVERGED = 3
    UNREACHABLE = 4
    INTERRUPTED = 130  # 128 + SIGINT, as shells answer


def code_of(error: KiteError) -> Exit:
    """Return the exit code that an error ends a command with."""
    match error:
        case UsageError():
            return Exit.USAGE
        case Unreachable():
            return Exit.UNREACHABLE
        case _:
            return Exit.FAILED
