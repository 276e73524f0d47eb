"""A folder put in the place of another, so that whoever opens a path below it never finds nothing there."""

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

AT_FDCWD = -100  # <fcntl.h>: paths are those of the working folder
RENAME_EXCHANGE = 1 << 1  # <linux/fs.h>
UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""What a kernel, a C library or a file system answers that cannot exchange two names (NFS, say)."""


def put_in_place(folder: Path, target: Path) -> None:
    """Give `folder` the name `target`; what was called so has the name of `folder` then, or is removed.

    In one step, where that can be. Where it cannot, what was there is moved aside first, and for a moment nothing is
    called `target`. Both are on one file system. Raises OSError.
    """
    try:
        _exchange(folder, target)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *UNSUPPORTED):
            raise
        _one_by_one(folder, target)


def _exchange(first: Path, second: Path) -> None:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(second))


def _one_by_one(folder: Path, target: Path) -> None:
    aside = folder.with_name(f"{folder.name}.aside")  # where the next opening of the store sweeps what a crash left
    with suppress(FileNotFoundError):
        target.rename(aside)
    folder.rename(target)
    shutil.rmtree(aside, ignore_errors=True)
