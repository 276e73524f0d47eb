"""The embedded backend: one SQLite file in WAL mode, one connection that writes, readers beside it.

Rows go to the driver directly: SQLAlchemy's own path costs a multiple per row. SQLite before 3.51.3 can corrupt a file
in WAL mode that has two connections, hence the library of `pysqlite3`; a process must open the file with no other one,
because two libraries in one process drop each other's locks.
"""

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, DBAPIError, OperationalError, StatementError
from sqlalchemy.pool import NullPool

from kite.ledger.chain import GENESIS
from kite.ledger.errors import (
    DuplicateEvent,
    LeaseLost,
    LedgerMissing,
    LedgerUnwritable,
    NotALedger,
    SqliteTooOld,
)
from kite.ledger.lock import FileLock
from kite.ledger.port import PAGE_ROWS, Source, repeated
from kite.ledger.rows import Cursor, Head, Lease, Outgoing, Route, Row, Send
from kite.ledger.schema import require, upgrade

if TYPE_CHECKING:
    import sqlite3 as driver  # the same interface, with types; never imported

    from sqlalchemy import Connection
else:
    from pysqlite3 import dbapi2 as driver

SQLITE_NEEDED = (3, 51, 3)
"""The first release without the WAL-reset bug (there since 3.7.0)."""

BUSY_TIMEOUT_S = 5.0
"""How long a statement waits for a lock that another connection holds, say during a checkpoint."""

PAGE_BYTES = 8192
"""The page of a new file: rows of about 1 KiB waste less of it than of the usual 4096, and split it less often."""

CHECKPOINT_PAGES = 4_000
"""After how many pages of the write-ahead log they go into the file: each time costs an fsync in mid-append."""

WAL_LIMIT_BYTES = 64 * 1024 * 1024
"""To what size the write-ahead log is cut back after a checkpoint."""

_PRAGMAS = (
    f"page_size = {PAGE_BYTES}",
    "journal_mode = WAL",
    "synchronous = FULL",
    f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
    f"journal_size_limit = {WAL_LIMIT_BYTES}",
)

_LEASE = "SELECT epoch, holder, counter FROM lease"
_CLAIM = "UPDATE lease SET epoch = epoch + 1, holder = ?, counter = counter + 1"
_MOVE = "UPDATE lease SET counter = counter + 1 WHERE epoch = ? AND holder = ?"
_RELEASE = "UPDATE lease SET holder = '', counter = counter + 1 WHERE epoch = ? AND holder = ?"
_INSERT_ROW = "INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_INSERT_SEND = "INSERT INTO outbox (pos, subject, traceparent) VALUES (?, ?, ?)"
_UPSERT_CURSOR = """INSERT OR REPLACE INTO cursors (stream, bus_epoch, seq, msg_id, created, published_us)
                    VALUES (?, ?, ?, ?, ?, ?)"""
_CLEAR_ROUTES = "DELETE FROM routes"
_INSERT_ROUTE = "INSERT INTO routes (name, version, instance, endpoint, channel, pos) VALUES (?, ?, ?, ?, ?, ?)"
_HEAD = "SELECT pos, hash, ledger_us FROM ledger ORDER BY pos DESC LIMIT 1"
_KNOWN = "SELECT event_id, raw FROM ledger WHERE event_id IN (SELECT value FROM json_each(?))"
_CURSOR = "SELECT stream, bus_epoch, seq, msg_id, created, published_us FROM cursors WHERE stream = ?"
_PENDING = """SELECT o.pos, o.subject, l.raw, l.event_id, o.traceparent
              FROM outbox AS o JOIN ledger AS l ON l.pos = o.pos WHERE o.pos > ? ORDER BY o.pos LIMIT ?"""
_SENT = "DELETE FROM outbox WHERE pos <= ?"
_PAGE = "SELECT * FROM ledger WHERE pos BETWEEN ? AND ? ORDER BY pos LIMIT ?"

Values = tuple[int | str | bytes, ...]
_values: Callable[[Row], Values] = attrgetter(*Row.__slots__)


def require_library(found: tuple[int, ...] = driver.sqlite_version_info) -> None:
    """Raise SqliteTooOld when the SQLite library in use, or version `found`, could corrupt a ledger."""
    if found < SQLITE_NEEDED:
        raise SqliteTooOld(found, SQLITE_NEEDED)


def connect(path: Path) -> driver.Connection:
    """Open a read-write connection to `path`, which is created when it is not there; transactions are the caller's."""
    connection = driver.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    for pragma in _PRAGMAS:  # the page's size before the journal's mode, which writes the first one
        connection.execute(f"PRAGMA {pragma}")
    return connection


def reading(path: Path) -> Engine:
    """Return an engine whose connections can only read the ledger at `path`. Raises LedgerMissing, SqliteTooOld."""
    require_library()
    if not path.is_file():
        raise LedgerMissing(str(path))
    address = f"{path.as_uri()}?mode=ro"

    def creator() -> driver.Connection:
        return driver.connect(address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    return create_engine("sqlite://", module=driver, creator=creator, poolclass=NullPool)


def source(path: Path) -> Source:
    """Open the read-only side of the ledger at `path`. Raises LedgerMissing, LedgerTooNew, NotALedger, SqliteTooOld."""
    place = str(path)
    explain = partial(_fault, place)
    engine = reading(path)
    try:
        connection = engine.connect()
    except DBAPIError as error:
        raise explain(error) from error
    try:
        require(connection, place)
    except BaseException as error:
        connection.close()
        if isinstance(error, DBAPIError):
            raise explain(error) from error
        raise
    return Source(connection, place, partial(_page, connection, place), explain)


def _page(connection: "Connection", place: str, first: int, last: int) -> list[Row]:
    """Read whole rows past SQLAlchemy: half as fast again."""
    raw: driver.Connection | None = connection.connection.driver_connection
    if raw is None:
        raise NotALedger(place, "its connection is closed")
    try:
        return _read_page(raw, first, last)
    except driver.DatabaseError as error:
        raise NotALedger(place, str(error)) from error


def _fault(place: str, error: StatementError) -> NotALedger:
    return NotALedger(place, str(error.orig))


class SqliteStore:
    """A `Store` on one file. See `kite.ledger.port` for the methods."""

    def __init__(self, path: Path, lock: FileLock, connection: driver.Connection, holder: str) -> None:
        self._path = path
        self._lock: FileLock | None = lock
        self._connection = connection
        self._holder = holder
        self._epoch = 0

    @classmethod
    def open(cls, path: Path, holder: str) -> Self:
        """Lock and migrate the ledger at `path`. The lock comes first: nobody migrates under a running writer."""
        require_library()
        lock = FileLock.take(path, holder)
        try:
            _migrate(path)
            return cls(path, lock, connect(path), holder)
        except BaseException:
            lock.release()
            raise

    def take(self) -> Head:
        """See `Store`. The lock is the lease; its row says who has it, or had it last."""
        with self._transaction() as connection:
            connection.execute(_CLAIM, (self._holder,))
            self._epoch = self._lease().epoch
            pos, digest, ledger_us = connection.execute(_HEAD).fetchone() or (0, GENESIS, 0)
        return Head(pos, digest, ledger_us, self._epoch)

    def renew(self) -> None:
        """See `Store`."""
        with self._writing():
            pass

    def write(
        self,
        rows: Sequence[Row],
        sends: Sequence[tuple[int, Outgoing]],
        cursors: Sequence[Cursor],
        routes: Sequence[Route] | None = None,
        sent_pos: int = 0,
    ) -> None:
        """See `Store`."""
        try:
            with self._writing() as connection:
                connection.executemany(_INSERT_ROW, map(_values, rows))
                if sent_pos:
                    connection.execute(_SENT, (sent_pos,))
                connection.executemany(_INSERT_SEND, [(pos, send.subject, send.traceparent) for pos, send in sends])
                connection.executemany(_UPSERT_CURSOR, map(astuple, cursors))
                if routes is not None:
                    connection.execute(_CLEAR_ROUTES)
                    connection.executemany(_INSERT_ROUTE, map(astuple, routes))
        except driver.IntegrityError as error:  # with no id taken, somebody else has written at our position
            taken = repeated(rows, self.known)
            raise (DuplicateEvent(taken) if taken else LedgerUnwritable(str(self._path), str(error))) from error

    def known(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """See `Store`."""
        return dict(self._connection.execute(_KNOWN, (json.dumps(list(event_ids)),)).fetchall())

    def cursor(self, stream: str) -> Cursor | None:
        """See `Store`."""
        found = self._connection.execute(_CURSOR, (stream,)).fetchone()
        return Cursor.of(found) if found else None

    def pending(self, limit: int, after_pos: int = 0) -> list[Send]:
        """See `Store`."""
        return [Send(*values) for values in self._connection.execute(_PENDING, (after_pos, limit))]

    def sent(self, up_to_pos: int) -> None:
        """See `Store`."""
        with self._writing() as connection:
            connection.execute(_SENT, (up_to_pos,))

    def page(self, first: int, last: int) -> list[Row]:
        """See `Store`."""
        return _read_page(self._connection, first, last)

    def close(self) -> None:
        """See `Store`. The lock goes last."""
        if self._lock is None:
            return
        with suppress(driver.Error, LedgerUnwritable), self._transaction() as connection:
            connection.execute(_RELEASE, (self._epoch, self._holder))
        self._connection.close()
        self._lock.release()
        self._lock = None

    def _lease(self) -> Lease:
        return Lease(*self._connection.execute(_LEASE).fetchone())

    @contextmanager
    def _writing(self) -> "Generator[driver.Connection]":
        """Begin with the lease, as on PostgreSQL: on a file system whose locks do nothing, two would notice here."""
        with self._transaction() as connection:
            if not connection.execute(_MOVE, (self._epoch, self._holder)).rowcount:
                raise LeaseLost(str(self._path), self._epoch, self._lease())
            yield connection

    @contextmanager
    def _transaction(self) -> "Generator[driver.Connection]":
        """Take the write lock at once: an upgrade from reading to writing would fail whatever the timeout."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except driver.IntegrityError:
            raise
        except driver.DatabaseError as error:
            raise LedgerUnwritable(str(self._path), str(error)) from error
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")


def _read_page(connection: driver.Connection, first: int, last: int) -> list[Row]:
    return [Row(*values) for values in connection.execute(_PAGE, (first, last, PAGE_ROWS))]


def _migrate(path: Path) -> None:
    """Bring the file up to date in one transaction: a process killed in between leaves the schema as it was."""
    engine = create_engine("sqlite://", module=driver, creator=lambda: connect(path), poolclass=NullPool)
    event.listen(engine, "begin", _begin_immediate)
    try:
        with engine.begin() as connection:
            upgrade(connection, str(path))
    except OperationalError as error:
        raise LedgerUnwritable(str(path), str(error.orig)) from error
    except DatabaseError as error:
        raise NotALedger(str(path), str(error.orig)) from error


def _begin_immediate(connection: "Connection") -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
