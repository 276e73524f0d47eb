"""A disk that refuses: what tests of full and read-only folders need, for root as well."""

import ctypes
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

CAPABILITY_VERSION = 0x20080522  # <linux/capability.h>: version 3, two words
OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: what lets root write into a read-only folder


@contextmanager
def read_only(folder: Path) -> Generator[None]:
    """Take the right to write into a folder away, from root too. It is this thread's alone that root gives up."""
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, twice
    _done(libc.capget(header, held))
    less = (ctypes.c_uint32 * 6)(*held)
    less[0] &= ~OVERRIDE
    _done(libc.capset(header, less))
    try:
        yield
    finally:
        _done(libc.capset(header, held))
        folder.chmod(mode)


def _done(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
