"""Making what was written last: for files and folders whose names are told to others right afterwards."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder (a rename inside it), to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
