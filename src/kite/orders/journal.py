"""The journal of one worker: a small SQLite file that remembers what was begun and how it ended.

One connection, locked for as long as it is open; every write is on disk when its method returns. Calls block for one
fsync, twice an order: cheaper than a thread.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias

from kite.clock import US_PER_S, wall_us
from kite.orders.errors import JournalHeld, JournalTooNew, JournalUnwritable, NotAJournal

if TYPE_CHECKING:
    import sqlite3 as driver  # the same interface, with types; never imported
else:
    from pysqlite3 import dbapi2 as driver

SCHEMA = 2
"""1 had no notices: they are added to it."""
APPLICATION = 0x4B495445  # "KITE": tells a journal from other SQLite files
KEEP_US = 8 * 86_400 * US_PER_S
"""Ended orders are kept longer than the bus keeps decisions (7 days), so that none can come back unknown."""
PRUNE_EVERY = 64  # orders begun

_CREATE = """
CREATE TABLE orders (
    id TEXT PRIMARY KEY,
    target TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('begun', 'done', 'dropped')),
    raw BLOB NOT NULL,
    published_us INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    outcome BLOB NOT NULL,
    sent INTEGER NOT NULL,
    changed_us INTEGER NOT NULL
) STRICT
"""
_CREATE_NOTICES = """
CREATE TABLE notices (subject TEXT PRIMARY KEY, raw BLOB NOT NULL, published_us INTEGER NOT NULL) STRICT
"""
_NOTICE = """
INSERT INTO notices VALUES (?, ?, ?)
ON CONFLICT (subject) DO UPDATE SET raw = excluded.raw, published_us = excluded.published_us
"""
_NOTICES = "SELECT subject, raw, published_us FROM notices ORDER BY published_us"
_BEGIN = """
INSERT INTO orders VALUES (?, ?, 'begun', ?, ?, 1, x'', 0, ?)
ON CONFLICT (id) DO UPDATE SET attempt = attempt + 1, changed_us = excluded.changed_us
RETURNING attempt
"""
_REFUSE = "INSERT OR IGNORE INTO orders VALUES (?, ?, 'done', ?, ?, 0, ?, 0, ?)"
_DONE = "UPDATE orders SET state = 'done', outcome = ?, changed_us = ? WHERE id = ?"
_SENT = "UPDATE orders SET sent = 1, changed_us = ? WHERE id = ?"
_DROP = "INSERT OR IGNORE INTO orders VALUES (?, ?, 'dropped', x'', 0, 0, x'', 1, ?)"
_ABANDON = "UPDATE orders SET state = 'dropped', sent = 1, changed_us = ? WHERE id = ?"
_FIND = "SELECT id, target, state, raw, published_us, attempt, outcome FROM orders WHERE id = ?"
_OPEN = """SELECT id, target, state, raw, published_us, attempt, outcome FROM orders
           WHERE state = 'begun' OR (state = 'done' AND sent = 0) ORDER BY rowid"""
_PRUNE = "DELETE FROM orders WHERE state != 'begun' AND sent = 1 AND changed_us < ?"

Columns: TypeAlias = tuple[str, str, str, bytes, int, int, bytes]


class State(StrEnum):
    """How far an order is: its effect may have begun, its outcome is fixed, or it is not to be begun any more."""

    BEGUN = "begun"
    DONE = "done"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Entry:
    """One order. `raw` are its bytes as delivered, `outcome` those of its last fact (empty unless done).

    `attempt` is 0 for one that was never begun.
    """

    id: str
    target: str
    state: State
    raw: bytes
    published_us: int
    attempt: int
    outcome: bytes


@dataclass(frozen=True, slots=True)
class Notice:
    """The newest decision of one subject that the worker only has to know about."""

    subject: str
    raw: bytes
    published_us: int


class Journal:
    """The journal at one path, from `open` to `close`. `with Journal.open(path) as journal:`."""

    def __init__(self, path: Path, connection: driver.Connection) -> None:
        self._path = path
        self._connection = connection
        self._begun = 0

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open or create the journal. Raises JournalHeld, JournalTooNew, NotAJournal, JournalUnwritable."""
        connection = _connect(path)
        journal = cls(path, connection)
        try:
            _prepare(path, connection)
            journal.prune()
        except BaseException:
            connection.close()
            raise
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let the next worker in."""
        self._connection.close()

    def find(self, order_id: str) -> Entry | None:
        """Return what is known of an order."""
        with _guarded(self._path):
            found: Columns | None = self._connection.execute(_FIND, (order_id,)).fetchone()
        return _entry(found) if found else None

    def unfinished(self) -> list[Entry]:
        """Return the orders that were begun and not done, or done and not published, oldest first."""
        with _guarded(self._path):
            rows: list[Columns] = self._connection.execute(_OPEN).fetchall()
        return [_entry(row) for row in rows]

    def notices(self) -> list[Notice]:
        """Return the newest notice of each subject, the oldest first."""
        with _guarded(self._path):
            rows: list[tuple[str, bytes, int]] = self._connection.execute(_NOTICES).fetchall()
        return [Notice(*row) for row in rows]

    def notice(self, subject: str, raw: bytes, published_us: int) -> None:
        """Remember the newest notice of a subject: once acknowledged, the bus does not deliver it again."""
        self._change(_NOTICE, subject, raw, published_us)

    def begin(self, order_id: str, target: str, raw: bytes, published_us: int) -> int:
        """Record that an attempt begins, before it has any effect, and return its number, from 1."""
        self._begun += 1
        if self._begun % PRUNE_EVERY == 0:
            self.prune()
        with _guarded(self._path):
            values = (order_id, target, raw, published_us, wall_us())
            ((attempt,),) = self._connection.execute(_BEGIN, values).fetchall()
        return attempt

    def refuse(self, order_id: str, target: str, raw: bytes, published_us: int, outcome: bytes) -> None:
        """Fix the outcome of an order that is not begun, before it is published: its attempt is 0."""
        self._change(_REFUSE, order_id, target, raw, published_us, outcome, wall_us())

    def done(self, order_id: str, outcome: bytes) -> None:
        """Fix the outcome of a begun order, before it is published."""
        self._change(_DONE, outcome, wall_us(), order_id)

    def sent(self, order_id: str) -> None:
        """Record that the bus has the outcome."""
        self._change(_SENT, wall_us(), order_id)

    def drop(self, order_id: str, target: str) -> None:
        """Record that an order is not to be begun; one that is known stays as it is."""
        self._change(_DROP, order_id, target, wall_us())

    def abandon(self, order_id: str) -> None:
        """Record that nothing more can be done about a begun order."""
        self._change(_ABANDON, wall_us(), order_id)

    def prune(self) -> None:
        """Forget what ended more than KEEP_US ago."""
        self._change(_PRUNE, wall_us() - KEEP_US)

    def _change(self, statement: str, *values: str | int | bytes) -> None:
        with _guarded(self._path):
            self._connection.execute(statement, values)


def _connect(path: Path) -> driver.Connection:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = driver.connect(path, timeout=0, isolation_level=None)
    except (OSError, driver.DatabaseError) as error:
        raise JournalUnwritable(path, str(error)) from error
    return connection


def _prepare(path: Path, connection: driver.Connection) -> None:
    """Take the lock and check the schema, or create it. An exclusive lock is kept until the connection closes."""
    with _guarded(path):
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN EXCLUSIVE")
        found, application = _pragma(connection, "user_version"), _pragma(connection, "application_id")
        if found > SCHEMA and application == APPLICATION:
            raise JournalTooNew(path, found, SCHEMA)
        if not found and not connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            connection.execute(_CREATE)
            connection.execute(f"PRAGMA application_id = {APPLICATION}")
        elif application != APPLICATION:
            raise NotAJournal(path, "another program wrote it")
        if found < SCHEMA:
            connection.execute(_CREATE_NOTICES)
            connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")  # last: a file that is not ours stays as it is


def _pragma(connection: driver.Connection, name: str) -> int:
    (value,) = connection.execute(f"PRAGMA {name}").fetchone()
    return value


@contextmanager
def _guarded(path: Path) -> Generator[None]:
    try:
        yield
    except driver.OperationalError as error:
        raise JournalHeld(path) if "locked" in str(error) else JournalUnwritable(path, str(error)) from error
    except driver.DatabaseError as error:
        raise NotAJournal(path, str(error)) from error


def _entry(row: Columns) -> Entry:
    order_id, target, state, raw, published_us, attempt, outcome = row
    return Entry(order_id, target, State(state), raw, published_us, attempt, outcome)
