"""The folder of a fleet: made, locked against a second `kite up`, and kept locked until the last service is gone."""

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from kite.clock import US_PER_S, mono_us
from kite.errors import Fault, KiteError
from kite_cli import place

LOCK = "lock"
LEFT_S = 20.0
"""How long the services of a `kite up` that was killed may take to end."""

POLL_S = 0.1
FOLDER_MODE = 0o755


class FleetRuns(KiteError):
    """Another `kite up` runs on this folder."""

    code = "fleet_runs"
    fault = Fault.USER

    def __init__(self, directory: Path, pid: int | None) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(
            f"a fleet runs in {directory} already ({who})",
            hint="stop that one with Ctrl-C, or give this one another folder by --dir",
        )
        self.directory = directory
        self.pid = pid


class ServicesLeft(KiteError):
    """A `kite up` was killed, and services that it started do not end."""

    code = "services_left"
    fault = Fault.OPERATOR

    def __init__(self, directory: Path, pids: dict[str, int]) -> None:
        named = ", ".join(f"{name} {pid}" for name, pid in pids.items()) or "not known which"
        super().__init__(
            f"services of a killed `kite up` still hold {directory}: {named}",
            hint="they were told to end; kill them by their process ids",
        )
        self.directory = directory
        self.pids = pids


class DirectoryUnusable(KiteError):
    """The folder of the fleet cannot be made or written."""

    code = "directory_unusable"
    fault = Fault.USER

    def __init__(self, directory: Path, why: str) -> None:
        super().__init__(f"cannot write in {directory}: {why}", hint="name a folder that you can write by --dir")
        self.directory = directory


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder that is ours; `lock` is the descriptor that every service inherits."""

    directory: Path
    lock: int

    def folder(self, path: Path) -> None:
        """Make a folder below. Raises DirectoryUnusable."""
        try:
            path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryUnusable(path, error.strerror or str(error)) from error


@asynccontextmanager
async def claimed(directory: Path) -> AsyncGenerator[Claim]:
    """Make the folder and hold it. Raises DirectoryUnusable, and FleetRuns while somebody else has it."""
    lock = _open(directory)
    try:
        await _take(directory, lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield Claim(_full(directory), lock)
    finally:
        os.close(lock)


def _full(directory: Path) -> Path:
    return directory.resolve()


def _open(directory: Path) -> int:
    try:
        directory.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        return os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise DirectoryUnusable(directory, error.strerror or str(error)) from error


async def _take(directory: Path, lock: int) -> None:
    """Lock the folder; when its owner is dead, wait for the services it left, which are ending."""
    until_us = mono_us() + int(LEFT_S * US_PER_S)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(lock)
            if owner is None or psutil.pid_exists(owner):
                raise FleetRuns(directory, owner) from None
            if mono_us() >= until_us:
                raise ServicesLeft(directory, _living(directory)) from None
            await asyncio.sleep(POLL_S)
        else:
            return


def _living(directory: Path) -> dict[str, int]:
    try:
        pids = place.read(directory).pids
    except KiteError:
        return {}
    return {name: pid for name, pid in pids.items() if psutil.pid_exists(pid)}


def _owner(lock: int) -> int | None:
    text = os.pread(lock, 32, 0).strip()
    return int(text) if text.isdigit() else None
