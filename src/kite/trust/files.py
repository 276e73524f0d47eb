"""Key files: one line, the kind of the key and its 32 bytes in hex. A private key is its owner's alone, and the public
one lies beside it. The kind stands in the file so that nobody gives away a private key in place of a public one.
"""

import os
import re
import stat
from pathlib import Path

from kite import durable
from kite.trust.errors import KeyFileExists, KeyFileMissing, KeyFileOpen, KeyFileUnreadable, KeyFileUnwritable
from kite.trust.signing import KEY_BYTES, Signer

PRIVATE, PUBLIC = "kite-private-key", "kite-public-key"
PRIVATE_MODE, PUBLIC_MODE, FOLDER_MODE = 0o600, 0o644, 0o700
OTHERS = stat.S_IRWXG | stat.S_IRWXO
PRIVATE_SUFFIX, PUBLIC_SUFFIX = ".key", ".pub"
FILE_MAX_BYTES = 256
_LINE = re.compile(rf"({PRIVATE}|{PUBLIC}) ([0-9a-f]{{{2 * KEY_BYTES}}})\n?")


def public_path(path: Path) -> Path:
    """Return where the public half of a private key lies.

    >>> str(public_path(Path("operator.key"))), str(public_path(Path("node-1.2")))
    ('operator.pub', 'node-1.2.pub')
    """
    stem = path.stem if path.suffix == PRIVATE_SUFFIX else path.name
    return path.with_name(f"{stem}{PUBLIC_SUFFIX}")


def new_key(path: Path) -> Signer:
    """Make a key at `path` (mode 0600) and its public half at `public_path`; a folder that is made is mode 0700.

    Both are on disk when this returns, or neither. Raises KeyFileExists (nothing is replaced) and KeyFileUnwritable.
    """
    signer = Signer.generate()
    _write(path, PRIVATE, signer.seed)
    try:
        _write(public_path(path), PUBLIC, signer.public)
    except BaseException:
        path.unlink()
        raise
    return signer


def kept_key(path: Path) -> Signer:
    """Return the key at `path`, made now if there is none; a public half that is missing is written again.

    Raises the errors of `new_key` and `load_signer`, and KeyFileUnreadable for the public half of another key.
    """
    try:
        signer = load_signer(path)
    except KeyFileMissing:
        return new_key(path)
    beside = public_path(path)
    try:
        public = load_public(beside)
    except KeyFileMissing:
        _write(beside, PUBLIC, signer.public)
        return signer
    if public != signer.public:
        raise KeyFileUnreadable(beside, f"it is not the public half of {path}")
    return signer


def load_signer(path: Path) -> Signer:
    """Read a private key. Raises KeyFileMissing, KeyFileOpen when others can read it, KeyFileUnreadable."""
    return Signer.of(_read(path, PRIVATE))


def load_public(path: Path) -> bytes:
    """Read a public key (32 bytes). Raises KeyFileMissing, KeyFileUnreadable (also for a private key)."""
    return _read(path, PUBLIC)


def _read(path: Path, kind: str) -> bytes:
    try:
        with path.open("rb") as stream:
            text = stream.read(FILE_MAX_BYTES).decode("ascii")
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
    except FileNotFoundError:
        raise KeyFileMissing(path) from None
    except OSError as error:
        raise KeyFileUnreadable(path, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise KeyFileUnreadable(path, "not one line of text") from error
    found = _LINE.fullmatch(text)
    if found is None:
        raise KeyFileUnreadable(path, f"not one line `{kind} …` with {2 * KEY_BYTES} hex digits")
    if found[1] != kind:
        raise KeyFileUnreadable(path, f"it holds a `{found[1]}`, not a `{kind}`")
    if kind == PRIVATE and mode & OTHERS:
        raise KeyFileOpen(path, mode)
    return bytes.fromhex(found[2])


def _write(path: Path, kind: str, key: bytes) -> None:
    handle = _create(path, PRIVATE_MODE if kind == PRIVATE else PUBLIC_MODE)
    try:
        with os.fdopen(handle, "w", encoding="ascii") as stream:
            stream.write(f"{kind} {key.hex()}\n")
            stream.flush()
            os.fsync(stream.fileno())
        durable.sync(path.parent)
    except OSError as error:
        path.unlink()
        raise KeyFileUnwritable(path, error.strerror or str(error)) from error


def _create(path: Path, mode: int) -> int:
    """Return an open file that was not there before."""
    try:
        path.parent.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    except OSError as error:
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise KeyFileExists(path) from None
        raise KeyFileUnwritable(path, error.strerror or str(error)) from error
