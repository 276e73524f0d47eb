"""Files of the store that are written once: complete under their name, or not there at all."""

import os
import tempfile
from pathlib import Path

from kite.durable import sync

FILE_MODE = 0o444


def write(path: Path, content: bytes) -> None:
    """Write a file and its folder so that both outlast a crash; the name is told to others right after. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".written.") as scratch:
        made = Path(scratch) / path.name
        with made.open("xb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), FILE_MODE)
            os.fsync(file.fileno())
        made.replace(path)
    sync(path.parent)
