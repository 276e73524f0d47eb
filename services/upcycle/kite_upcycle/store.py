"""The content-addressed store of blends: `<root>/sha256/<digest>/`, immutable, complete or not there at all."""

import errno
import fcntl
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kite.durable import sync
from kite.errors import Fault, KiteError, MissingPath, UsageError
from kite_schemas.model import NAME_MAX_CHARS, NAME_PATTERN
from kite_upcycle.exchange import put_in_place
from kite_upcycle.reader import CONFIG_NAME, MANIFEST_NAME, TENSORS_NAME, digest
from kite_upcycle.violations import UnreadableAdapter

MANIFEST_VERSION = 1
SHORT_DIGEST_CHARS = 12
MAX_MEMBERS = 64
Method = Literal["concatenate", "recompress"]
FOLDER_MODE = 0o755  # vLLM may run as another user
FILE_MODE = 0o444
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BLEND = re.compile(NAME_PATTERN)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CONTENTS = {CONFIG_NAME, TENSORS_NAME, MANIFEST_NAME}


class StoreFull(KiteError):
    """There is no space left for a version; nothing of it was kept."""

    code: ClassVar[str] = "store_full"
    fault: ClassVar[Fault] = Fault.OPERATOR
    retryable: ClassVar[bool] = True

    def __init__(self, root: Path, free_bytes: int) -> None:
        super().__init__(
            f"the store {root} is full: {free_bytes} bytes free",
            hint="free space or enlarge the volume, then inject again; versions that are served are not deleted",
        )
        self.free_bytes = free_bytes


class StoreDamaged(KiteError):
    """A stored version is not what its name says: it must not be loaded."""

    code: ClassVar[str] = "store_damaged"
    fault: ClassVar[Fault] = Fault.OPERATOR

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"version {path} is damaged: {reason}", hint="check the disk; remove the folder, inject again")
        self.path = path
        self.reason = reason


class IncompleteVersion(KiteError):
    """The builder left something else than the files of a version; nothing was stored."""

    code: ClassVar[str] = "incomplete_version"

    def __init__(self, names: list[str]) -> None:
        super().__init__(f"a version consists of {sorted(_CONTENTS)}, the builder left {names}")
        self.names = names


class MemberRecord(BaseModel):
    """One member of a stored blend: content address and weight in parts per million."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    weight_ppm: int = Field(ge=1, le=1_000_000)


class Manifest(BaseModel):
    """Where a version came from. It holds no time and no name, so that the same blend has the same bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = MANIFEST_VERSION
    members: tuple[MemberRecord, ...] = Field(min_length=1, max_length=MAX_MEMBERS)
    method: Method
    rank: int = Field(ge=1)
    residual_ppm: int = Field(ge=0)
    residuals: dict[str, int] = Field(default={}, description="of the modules that were recompressed, the worst first")
    parameters: int = Field(ge=1)
    base: str = Field(pattern=r"^[0-9a-f]{64}$")
    tool: str

    def to_bytes(self) -> bytes:
        """Serialise with sorted keys."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=2).encode("ascii") + b"\n"


@dataclass(frozen=True)
class Version:
    """One stored blend; `path` is what vLLM loads."""

    digest: str
    path: Path
    manifest: Manifest

    @property
    def size_bytes(self) -> int:
        """What its files take."""
        return _size_bytes(self.path)


def served_name(blend: str, address: str) -> str:
    """Return the name under which a version is served: vLLM keys its prefix cache by it, so it carries the version.

    Raises UsageError for a blend name that does not match the pattern, or an address that is no sha256.

    >>> served_name("credit", "ab" * 32)
    'credit@abababababab'
    """
    if len(blend) > NAME_MAX_CHARS or not _BLEND.fullmatch(blend):
        raise UsageError(
            f"blend name {blend!r} is not allowed", hint=f"use letters, digits and ._- (at most {NAME_MAX_CHARS})"
        )
    return f"{blend}@{_checked(address)[:SHORT_DIGEST_CHARS]}"


class Store:
    """A store below one folder. Opening it removes what a crashed build left behind."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = root / "sha256"
        self._incoming = root / "incoming"
        for folder in (self._versions, self._incoming):
            folder.mkdir(parents=True, exist_ok=True)
        self._sweep()

    def path_of(self, address: str) -> Path:
        """Return where a version lies or would lie. Raises UsageError for what is no sha256."""
        return self._versions / _checked(address)

    def put(self, build: Callable[[Path], Manifest]) -> Version:
        """Let `build` write tensors and configuration into a fresh folder, add its manifest, and store the result.

        Idempotent: a version that is there already is checked and returned. Raises StoreFull, StoreDamaged, and
        whatever `build` raises; a failure leaves nothing behind.
        """
        try:
            with self._fresh() as folder:
                return self._commit(folder, build(folder))
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(self._root, shutil.disk_usage(self._root).free) from error
            raise

    def check(self, address: str) -> Version:
        """Hash a stored version again. Raises MissingPath when there is none, StoreDamaged when it differs."""
        path = self.path_of(address)
        if not path.is_dir():
            raise MissingPath(f"version {address} is not in the store", hint="see `kite upcycle show` for what is")
        try:
            found = digest(path)
            manifest = Manifest.model_validate_json((path / MANIFEST_NAME).read_bytes())
        except (UnreadableAdapter, OSError, ValidationError) as error:
            raise StoreDamaged(path, str(error)) from error
        if found != address:
            raise StoreDamaged(path, f"its content is {found}")
        return Version(address, path, manifest)

    def restore(self, build: Callable[[Path], Manifest], check: Callable[[str], None]) -> Version:
        """Store what `build` makes, as `put` does, in place of a version of the same content that is damaged.

        `check` is given its digest before anything is replaced, and raises when it is not the one that is wanted.
        """
        try:
            return self._restored(build, check)
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFull(self._root, shutil.disk_usage(self._root).free) from error
            raise

    def _restored(self, build: Callable[[Path], Manifest], check: Callable[[str], None]) -> Version:
        with self._fresh() as folder:
            manifest = build(folder)
            self._seal(folder, manifest)
            address = digest(folder)
            check(address)
            try:
                return self.check(address)
            except (MissingPath, StoreDamaged):
                put_in_place(folder, self.path_of(address))  # an engine may read it again at any moment
            sync(self._versions)
            return Version(address, self.path_of(address), manifest)

    def delete(self, address: str) -> int:
        """Take a version out, whole at once, and return the bytes that this freed: 0 when it is not there."""
        path = self.path_of(address)
        freed_bytes = _size_bytes(path) if path.is_dir() else 0
        self._discard(address)
        return freed_bytes

    def sizes(self, address: str) -> tuple[tuple[str, int, int], ...]:
        """Return name, size in bytes and time of change (ns) of each file of a version, by name; none when it is gone.

        What an engine reads later is as it was checked as long as these are: cheap enough to look at every few seconds.
        """
        try:
            found = [(entry.name, entry.stat()) for entry in os.scandir(self.path_of(address))]
        except FileNotFoundError:
            return ()
        return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))

    def _discard(self, address: str) -> None:
        """Move a version aside, so that nobody sees half of it, and remove it there: on a full disk, too.

        What a crash leaves there is swept; nothing is made for it, since there may be no room for a folder.
        """
        aside = self._incoming / uuid.uuid4().hex
        try:
            self.path_of(address).rename(aside)
        except FileNotFoundError:
            return
        sync(self._versions)
        shutil.rmtree(aside, ignore_errors=True)

    def _commit(self, folder: Path, manifest: Manifest) -> Version:
        self._seal(folder, manifest)
        address = digest(folder)
        target = self.path_of(address)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            return self.check(address)
        sync(self._versions)
        return Version(address, target, manifest)

    def _seal(self, folder: Path, manifest: Manifest) -> None:
        """Add the manifest, and make all of it durable and read-only. Raises IncompleteVersion."""
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        names = {path.name for path in folder.iterdir()}
        if names != _CONTENTS:
            raise IncompleteVersion(sorted(names))
        for name in sorted(names):
            (folder / name).chmod(FILE_MODE)
            sync(folder / name)
        sync(folder)

    @contextmanager
    def _fresh(self) -> Generator[Path]:
        """Yield an empty folder that no other process sweeps, and remove it unless it was renamed away."""
        folder, lock = self._claim()
        try:
            folder.chmod(FOLDER_MODE)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)

    def _claim(self) -> tuple[Path, int]:
        """Make a folder and lock it; start over when another process swept it between the two."""
        while True:
            folder = self._incoming / uuid.uuid4().hex
            folder.mkdir()
            lock = _lock(folder)
            if lock is not None:
                return folder, lock

    def _sweep(self) -> None:
        for folder in self._incoming.iterdir():
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _lock(folder: Path) -> int | None:
    """Take the lock of a folder that is still there; None when a living process holds it. Death releases it."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if folder.exists():
        return lock
    os.close(lock)
    return None


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _checked(address: str) -> str:
    if _DIGEST.fullmatch(address):
        return address
    raise UsageError(f"{address!r} is no version", hint="a version is a sha256 of 64 hexadecimal digits")
