"""Changing the metadata of a safetensors file: whoever looks finds the old file or the new one, never half of one.

The new file is written beside the old one, flushed, and renamed over it. Its tensors are the old bytes. A lock on the
folder keeps two writers apart; it ends with its process, and what a killed one left is removed by the next.
"""

import errno
import fcntl
import os
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import ClassVar

from kite.errors import Fault, KiteError
from kite_upcycle import files, header, reader
from kite_upcycle.header import LENGTH_BYTES, MAX_HEADER_BYTES
from kite_upcycle.reader import MANIFEST_NAME, TENSORS_NAME
from kite_upcycle.violations import UnreadableAdapter, Violation

TEMPORARY = f".{TENSORS_NAME}."
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_WRITERS_MODE = 0o600  # until the file has the old one's

Change = Callable[[Mapping[str, str]], Mapping[str, str]]
"""Return the new metadata for the old."""


class Unwritable(KiteError):
    """The adapter's folder or file cannot be written; the adapter is as it was."""

    code: ClassVar[str] = "adapter_unwritable"
    fault: ClassVar[Fault] = Fault.USER

    def __init__(
        self, path: Path, reason: str, hint: str = "see who owns the folder, and how full its disk is"
    ) -> None:
        super().__init__(f"adapter {path} was not changed: {reason}", hint=hint)
        self.path = path
        self.reason = reason


def rewrite(path: Path, change: Change, *, digest: str | None = None, backup: str | None = None) -> None:
    """Replace the metadata of the tensors in the folder `path`; equal metadata leave the file alone.

    With `digest`, the adapter must still have it: what was verified is what is changed. With `backup`, the old file is
    kept under that name first. Raises UnreadableAdapter, or Unwritable, which leaves the adapter as it was.
    """
    try:
        with _locked(path) as folder:
            if digest is not None and reader.digest(path) != digest:
                raise Unwritable(path, "it was changed meanwhile", hint="run the command again")
            _replace(path, folder, change, backup)
    except OSError as error:
        raise Unwritable(path, error.strerror or type(error).__name__) from error


@contextmanager
def _locked(path: Path) -> Generator[int]:
    folder = os.open(path, _FOLDER)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unwritable(path, "another command is changing it", hint="wait for that command to end") from error
        _sweep(folder)
        yield folder
    finally:
        os.close(folder)


def _sweep(folder: int) -> None:
    """Remove what a killed writer left: nobody else is at work here."""
    for name in os.listdir(folder):
        if name.startswith(TEMPORARY):
            os.unlink(name, dir_fd=folder)


def _replace(path: Path, folder: int, change: Change, backup: str | None) -> None:
    if files.exists(folder, MANIFEST_NAME):
        raise Unwritable(path, "it is a stored version, which its digest names", hint="stamp the members instead")
    file = files.open_file(folder, TENSORS_NAME, reader.MAX_TENSORS_BYTES)
    if isinstance(file, Violation):
        raise UnreadableAdapter(str(path), (file,))
    with file:
        found, violations = reader.read_header(file)
        if found is None or violations:
            raise UnreadableAdapter(str(path), tuple(violations))
        changed = change(found.metadata)
        if changed == found.metadata:
            return
        first = header.build(found.entries.values(), changed)
        if len(first) - LENGTH_BYTES > MAX_HEADER_BYTES:
            raise Unwritable(path, f"its header would be larger than {MAX_HEADER_BYTES} bytes")
        if backup is not None:
            _keep(path, folder, file, backup)
        _write(folder, TENSORS_NAME, first, file, found.data_start)


def _keep(path: Path, folder: int, file: FileIO, name: str) -> None:
    """Copy the file as it is; the copy of an earlier try is left if it is the same, and never overwritten if not."""
    if not files.exists(folder, name):
        _write(folder, name, b"", file, 0)
        return
    kept = files.open_file(folder, name, reader.MAX_TENSORS_BYTES)
    if isinstance(kept, Violation):
        raise Unwritable(path, f"its backup is no file: {kept}", hint=f"move {name} away")
    with kept:
        if files.frame([("", kept)]) != files.frame([("", file)]):
            raise Unwritable(path, f"{name} is there and is something else", hint="move the backup away")


def _write(folder: int, name: str, first: bytes, source: FileIO, start: int) -> None:
    """Put `first`, and the source from byte `start` on, under a name, with the source's permissions."""
    temporary = f"{TEMPORARY}{uuid.uuid4().hex}"
    try:
        with FileIO(os.open(temporary, _NEW, _WRITERS_MODE, dir_fd=folder), "w") as target:
            _put(target, first)
            source.seek(start)
            while chunk := source.read(files.CHUNK_BYTES):
                _put(target, chunk)
            os.fchmod(target.fileno(), os.fstat(source.fileno()).st_mode & 0o7777)
            os.fsync(target.fileno())
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:  # also when the user interrupts: nothing half is left, not even under another name
        _forget(folder, temporary)
        raise
    os.fsync(folder)


def _put(target: FileIO, chunk: bytes) -> None:
    """Write all of it: a write to a disk that is filling up may take a part only."""
    view = memoryview(chunk)
    while view:
        view = view[target.write(view) :]


def _forget(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EROFS, errno.EACCES):
            raise
