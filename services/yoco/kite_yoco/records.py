"""What a yoco writes down of its engines, so that the next one finds them; and the lock that says that one is there.

One file an instance, replaced in one step. It is on the disk before the process can serve. Later steps are not waited
for: they matter only as long as the process lives, and no process outlives the memory in which they are.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import structlog
from pydantic import ValidationError

from kite.durable import sync
from kite.engine import EngineSpec, Keep
from kite.engine.identity import Identity
from kite.engine.kept import End, read_end
from kite.errors import Fault, KiteError
from kite.keeper import KEEP_S, take
from kite_schemas.model import Bytes, Count, Micronats, Model, Name, Text
from kite_schemas.yoco import SleepMode, State

FOLDER = "engines"
LOCK = "yoco.lock"
RECORD = ".json"
END = ".end"

log: structlog.stdlib.BoundLogger = structlog.get_logger()


class StateUnwritable(KiteError):
    """The state folder cannot be made or written."""

    code = "state_unwritable"
    fault = Fault.OPERATOR

    def __init__(self, folder: Path, why: str) -> None:
        super().__init__(f"cannot write {folder}: {why}", hint="set KITE_STATE_DIR to a folder of this service's own")
        self.folder = folder
        self.why = why


class StateHeld(KiteError):
    """Another yoco works in this state folder. It goes away when that process ends."""

    code = "state_held"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, folder: Path) -> None:
        super().__init__(
            f"{folder} is in use by another yoco",
            hint="one yoco owns the engines of a node: stop the other one, or use another state folder",
        )
        self.folder = folder


class Record(Model):
    """One engine under its keeper. `process` is None between the start of the keeper and that of the engine."""

    instance: Name
    state: State
    spec: EngineSpec
    port: Count
    device: Text
    mode: SleepMode | None
    noise_micronats: Micronats
    log_file: Text
    log_start_bytes: Bytes
    keeping: Identity
    process: Identity | None


@contextmanager
def holding(state_dir: Path) -> Generator[None]:
    """Hold the lock of a state folder. Raises StateHeld, and StateUnwritable when it cannot be made."""
    try:
        lock = os.open(state_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateUnwritable(state_dir, error.strerror or str(error)) from error
    try:
        if not take(lock):
            raise StateHeld(state_dir)
        yield
    finally:
        os.close(lock)


class Records:
    """The records in a state folder. `keep_s` is how long an engine is kept without a yoco."""

    def __init__(self, state_dir: Path, keep_s: float = KEEP_S) -> None:
        self._state_dir = state_dir.absolute()
        self._folder = self._state_dir / FOLDER
        self.keep_s = keep_s

    def prepare(self) -> None:
        """Make the folder. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def keep(self, instance: str) -> "Keep":
        """Return where the keeper of an instance looks and writes; the end of the one before is forgotten."""
        self._end(instance).unlink(missing_ok=True)
        return Keep(self._state_dir / LOCK, self._end(instance), self.keep_s)

    def save(self, record: Record, *, durable: bool = False) -> None:
        """Write a record in one step; `durable`: it is on the disk afterwards. Raises OSError."""
        aside = self._folder / f"{record.instance}.new"
        aside.write_text(record.model_dump_json(), encoding="utf-8")
        if durable:
            sync(aside)
        aside.replace(self._path(record.instance))
        if durable:
            sync(self._folder)

    def forget(self, instance: str) -> None:
        """Remove a record. Raises OSError."""
        self._path(instance).unlink(missing_ok=True)

    def end_of(self, record: Record) -> End | None:
        """Return how the engine of a record ended, None when its keeper has not said."""
        return read_end(self._end(record.instance), record.process.pid if record.process else None)

    def end_path(self, record: Record) -> Path:
        """Return where the keeper of a record writes how its engine ended."""
        return self._end(record.instance)

    def all(self) -> list[Record]:
        """Return every record, by instance; what cannot be read is moved aside and said in the log.

        Raises StateUnwritable.
        """
        found: list[Record] = []
        for path in sorted(self._folder.glob(f"*{RECORD}")):
            try:
                found.append(Record.model_validate_json(path.read_bytes()))
            except OSError as error:
                raise StateUnwritable(path, error.strerror or str(error)) from error
            except ValidationError as error:
                log.error("record_unreadable", path=str(path), reason=str(error))
                path.rename(path.with_suffix(".unreadable"))
        return found

    def _path(self, instance: str) -> Path:
        return self._folder / f"{instance}{RECORD}"

    def _end(self, instance: str) -> Path:
        return self._folder / f"{instance}{END}"
