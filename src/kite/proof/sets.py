"""Probe sets in the store: `store/probes/<SHA-256 of its bytes>.json` below the adapter root, written once."""

from pathlib import Path
from typing import ClassVar

from kite import probes
from kite.errors import Fault, KiteError
from kite.probes import FILE_MAX_BYTES, Probes, ProbesInvalid
from kite.proof.files import write

FOLDER = "store/probes"


class ProbesMissing(KiteError):
    """A set that an order names is not in the store."""

    code: ClassVar[str] = "probes_missing"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path) -> None:
        super().__init__(f"probe set {path} is not there", hint="every node must mount the same adapter root")
        self.path = path


class ProbesAltered(KiteError):
    """A set is not what its name says: nothing is measured with it."""

    code: ClassVar[str] = "probes_altered"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"probe set {path} was altered: {why}", hint="remove it and add the set again")
        self.path = path
        self.why = why


class ProbesUnwritable(KiteError):
    """A set cannot be written."""

    code: ClassVar[str] = "probes_unwritable"
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = True

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"cannot write probe set {path}: {why}", hint="see who owns the adapter root, and its disk")
        self.path = path


def place(digest: str) -> str:
    """Return the path of a set, relative to the adapter root."""
    return f"{FOLDER}/{digest}.json"


def keep(root: Path, chosen: Probes) -> str:
    """Write a set below the adapter root unless it is there, and return its path. Raises what `load` does, and
    ProbesUnwritable.
    """
    relative = place(chosen.digest)
    try:
        if not (root / relative).exists():
            write(root / relative, probes.content(chosen.prompts))
    except OSError as error:
        raise ProbesUnwritable(root / relative, error.strerror or str(error)) from error
    load(root, chosen.digest)
    return relative


def load(root: Path, digest: str | None) -> Probes:
    """Return the set with a digest (None: the shipped one). Raises ProbesMissing, or ProbesAltered when the file has
    another digest or is no probe set.
    """
    shipped = probes.default()
    if digest in (None, shipped.digest):
        return shipped
    path = root / place(digest)
    try:
        found = probes.parse(_read(path), path.name)
    except ProbesInvalid as error:
        raise ProbesAltered(path, str(error)) from None
    if found.digest != digest:
        raise ProbesAltered(path, f"its digest is {found.digest}")
    return found


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ProbesMissing(path)
    try:
        with path.open("rb") as file:
            return file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise ProbesAltered(path, error.strerror or str(error)) from error
