"""Opening files that strangers wrote: below the root, no symlinks, no devices, bounded, hashed from what was opened.

Each folder is opened from its parent's descriptor, so that nothing can be swapped between check and use.
"""

import hashlib
import os
import re
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from kite_upcycle.violations import Code, Violation, violation

CHUNK_BYTES = 1024 * 1024
FRAME_BYTES = 8
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+\-]{0,127}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # non-blocking: a FIFO must not hold us up


@contextmanager
def open_folder(path: Path, root: Path | None) -> Generator[int | Violation]:
    """Yield a descriptor of the folder `path`, or why there is none.

    With a root, a relative path starts there, every part must match the pattern of names, and none may be a symlink;
    the root itself is the operator's and may be one. Without, only the last part must not be a symlink.
    """
    start, parts = _split(path, root)
    opened = start if isinstance(start, Violation) else _descend(start, parts)
    try:
        yield opened
    finally:
        if isinstance(opened, int):
            os.close(opened)


def _split(path: Path, root: Path | None) -> tuple[Path | Violation, tuple[str, ...]]:
    if root is None:
        return path.parent, (path.name,) if path.name else (".",)
    inside = next((path.relative_to(top) for top in (root, root.resolve()) if path.is_relative_to(top)), path)
    if inside.is_absolute() or ".." in inside.parts:
        return violation(Code.OUTSIDE_ROOT, str(path), expected="a path below the adapter root", found=str(path)), ()
    odd = next((part for part in inside.parts if not _COMPONENT.fullmatch(part)), None)
    if odd is not None:
        return violation(Code.PATH_NAME, str(path), expected="letters, digits and ._@+- in each name", found=odd), ()
    return root, inside.parts


def _descend(start: Path, parts: tuple[str, ...]) -> int | Violation:
    try:
        folder = os.open(start, _FOLDER)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        return violation(Code.MISSING_FILE, str(start), expected="a folder", found=_reason(error))
    for part in parts:
        parent = folder
        try:
            folder = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
        except (OSError, ValueError) as error:
            return _why_closed(part, parent, error)
        finally:
            os.close(parent)
    return folder


def _why_closed(name: str, folder: int, error: OSError | ValueError) -> Violation:
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except (OSError, ValueError):
        return violation(Code.MISSING_FILE, name, expected="to exist", found=_reason(error))
    if stat.S_ISLNK(mode):
        return violation(Code.SYMLINK, name, expected="no symlink", found="a symlink")
    return violation(Code.NOT_A_FILE, name, expected="to be readable", found=_reason(error))


def _reason(error: OSError | ValueError) -> str:
    return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)


def open_file(folder: int, name: str, max_bytes: int) -> FileIO | Violation:
    """Open a plain file of at most `max_bytes` in an open folder, or say why not."""
    try:
        opened = os.open(name, _FILE, dir_fd=folder)
    except OSError as error:
        return _why_closed(name, folder, error)
    status = os.fstat(opened)
    if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes:
        return FileIO(opened)  # only now: it refuses a folder, and leaves the descriptor open
    os.close(opened)
    if stat.S_ISREG(status.st_mode):
        return violation(Code.FILE_SIZE, name, expected=f"at most {max_bytes} bytes", found=f"{status.st_size} bytes")
    return violation(Code.NOT_A_FILE, name, expected="a plain file", found=stat.filemode(status.st_mode))


def exists(folder: int, name: str) -> bool:
    """Say whether an open folder has an entry of this name, of any kind."""
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return False  # opening it says why
    return True


def size_of(file: FileIO) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(file.fileno()).st_size


def state_of(file: FileIO) -> tuple[int, int]:
    """Return size in bytes and time of the last change in ns: both as before, and nobody has written meanwhile.

    The time is the inode's, which its owner cannot set back; it is as fine as the kernel's clock tick.
    """
    status = os.fstat(file.fileno())
    return status.st_size, status.st_ctime_ns


def read_at(file: FileIO, start: int, into: bytearray | memoryview) -> int:
    """Fill a buffer from byte `start` on; return the bytes read, which are fewer only where the file ends."""
    view, done = memoryview(into), 0
    file.seek(start)
    while done < len(into) and (count := file.readinto(view[done:])):
        done += count
    return done


def frame(files: Iterable[tuple[str, FileIO]]) -> str:
    """Return hex sha256 over named files: 8-byte length and name, then 8-byte length and body, of each in order."""
    total = hashlib.sha256()
    for name, file in files:
        total.update(_length(len(name)) + name.encode() + _length(size_of(file)))
        file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            total.update(chunk)
    return total.hexdigest()


def _length(size: int) -> bytes:
    return size.to_bytes(FRAME_BYTES, "little")
