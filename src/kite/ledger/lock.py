"""The lease of an embedded ledger: an advisory lock on a file beside the database.

It is not taken on the database itself: closing any descriptor of a file drops SQLite's own locks on it. The kernel
gives the lock back when its process ends, however it ends, so a restart never waits.
"""

import fcntl
import os
from pathlib import Path

from kite.ledger.errors import LedgerHeld, LedgerUnwritable

_PID_LIMIT_BYTES = 32


class FileLock:
    """The lock on one ledger, held from `take` to `release`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, database: Path) -> "FileLock":
        """Lock the ledger at `database` or raise LedgerHeld at once; LedgerUnwritable when no lock file can be made."""
        descriptor = _open(database)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, _PID_LIMIT_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LedgerHeld(database, holder or "unknown") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Let the next writer in. The file stays: removing it would let two writers lock two files of one name."""
        os.close(self._descriptor)


def _open(database: Path) -> int:
    beside = database.with_name(f"{database.name}.lock")
    try:
        return os.open(beside, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise LedgerUnwritable(str(database), error.strerror or str(error)) from error
