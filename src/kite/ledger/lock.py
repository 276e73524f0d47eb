"""The lease of an embedded ledger: an advisory lock on a file beside the database.

It is not taken on the database itself: closing any descriptor of a file drops SQLite's own locks on it. The kernel
gives the lock back when its process ends, however it ends, so a restart never waits.
"""

import fcntl
import os
from pathlib import Path

from kite.ledger.errors import LedgerHeld, LedgerUnwritable

_HOLDER_LIMIT_BYTES = 1024


class FileLock:
    """The lock on one ledger, held from `take` to `release`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def take(cls, database: Path, holder: str) -> "FileLock":
        """Lock the ledger at `database` for `holder`, whose name stays in the file.

        Raises LedgerHeld at once when it is locked, LedgerUnwritable when no lock file can be made.
        """
        descriptor = _open(database)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(descriptor, _HOLDER_LIMIT_BYTES, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise LedgerHeld(str(database), other or "an unknown process") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{holder}\n".encode()[:_HOLDER_LIMIT_BYTES], 0)
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
