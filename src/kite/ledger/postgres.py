"""The backend on a PostgreSQL server (14 or later): one session that writes, under a lease that is a row.

Rows go in by a binary COPY and come out by a binary cursor; SQLAlchemy reads what is looked for and migrates. A commit
whose answer was lost raises LedgerUnreachable, and may have happened: who opens the ledger again reads it in the head.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Self, cast

import psycopg
from psycopg.errors import LockNotAvailable, UniqueViolation
from psycopg.rows import args_row
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.exc import DBAPIError, StatementError
from sqlalchemy.pool import NullPool

from kite.errors import KiteError
from kite.ledger import lease
from kite.ledger.address import PostgresAddress
from kite.ledger.chain import GENESIS
from kite.ledger.errors import (
    DuplicateEvent,
    LedgerHeld,
    LedgerMissing,
    LedgerUnreachable,
    LedgerUnwritable,
    NotALedger,
)
from kite.ledger.port import PAGE_ROWS, Source, repeated
from kite.ledger.rows import Cursor, Head, Lease, Outgoing, Route, Row, Send
from kite.ledger.schema import require, upgrade
from kite.ledger.session import Session, close, connect, fault
from kite.ledger.tables import REVISIONS

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

MIGRATION_LOCK = 0x6B697465  # "kite": two that find an empty database at once migrate it one after the other

_TYPES = ["int8", "int8", "text", "int8", "int8", "text", "text", "text", "int8", "int8", "text", "text"]
_COPY: Final = "COPY ledger FROM STDIN (FORMAT BINARY)"
_COPY_TYPES = [*_TYPES, "bytea", "bytea", "bytea"]
_INSERT_SEND: Final = "INSERT INTO outbox (pos, subject, traceparent) VALUES (%s, %s, %s)"
_UPSERT_CURSOR: Final = """INSERT INTO cursors (stream, bus_epoch, seq, msg_id, created, published_us)
    VALUES (%s, %s, %s, %s, %s, %s)
    ON CONFLICT (stream) DO UPDATE SET bus_epoch = excluded.bus_epoch, seq = excluded.seq, msg_id = excluded.msg_id,
                                       created = excluded.created, published_us = excluded.published_us"""
_CLEAR_ROUTES: Final = "DELETE FROM routes"
_INSERT_ROUTE: Final = """INSERT INTO routes (name, version, instance, endpoint, channel, pos)
                          VALUES (%s, %s, %s, %s, %s, %s)"""
_HEAD: Final = "SELECT pos, hash, ledger_us FROM ledger ORDER BY pos DESC LIMIT 1"
_KNOWN: Final = "SELECT event_id, raw FROM ledger WHERE event_id = ANY(%s)"
_CURSOR: Final = "SELECT stream, bus_epoch, seq, msg_id, created, published_us FROM cursors WHERE stream = %s"
_PENDING: Final = """SELECT o.pos, o.subject, l.raw, l.event_id, o.traceparent
                     FROM outbox AS o JOIN ledger AS l ON l.pos = o.pos WHERE o.pos > %s ORDER BY o.pos LIMIT %s"""
_SENT: Final = "DELETE FROM outbox WHERE pos <= %s"
_PAGE: Final = "SELECT * FROM ledger WHERE pos BETWEEN %s AND %s ORDER BY pos LIMIT %s"
_MIGRATED: Final = "SELECT to_regclass('alembic_version') IS NOT NULL AND to_regclass('ledger') IS NOT NULL"
_REVISION: Final = "SELECT version_num FROM alembic_version"

Values = tuple[int | str | bytes, ...]
_values: Callable[[Row], Values] = attrgetter(*Row.__slots__)


class PostgresStore:
    """A `Store` on one database. See `kite.ledger.port` for the methods."""

    def __init__(self, place: str, session: Session, holder: str, seen: Lease | None) -> None:
        self._place = place
        self._session = session
        self._holder = holder
        self._seen = seen
        self._epoch = 0

    @classmethod
    def open(cls, address: PostgresAddress, holder: str, seen: Lease | None) -> Self:
        """Connect as `holder`, and migrate the database when it is older and nobody has the lease (see `take`)."""
        session = connect(address)
        try:
            if not _is_current(address.place, session):
                _migrate(address, seen)
        except BaseException:
            close(session)
            raise
        return cls(address.place, session, holder, seen)

    def take(self) -> Head:
        """See `Store`. A lease that another holds is taken when it still is what was `seen` standing still."""
        with self._refusing(), self._session.transaction():
            self._epoch = lease.claim(self._session, self._place, self._holder, self._seen)
            pos, digest, ledger_us = self._session.execute(_HEAD, binary=True).fetchone() or (0, GENESIS, 0)
        return Head(pos, digest, ledger_us, self._epoch)

    def renew(self) -> None:
        """See `Store`."""
        with self._transaction():
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
            with self._transaction():
                if rows:
                    self._copy(rows)
                self._put(sends, cursors, routes, sent_pos)
        except UniqueViolation as error:
            taken = repeated(rows, self.known)
            raise (DuplicateEvent(taken) if taken else LedgerUnwritable(self._place, str(error))) from error

    def known(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """See `Store`."""
        with self._refusing():
            return dict(self._session.execute(_KNOWN, (list(event_ids),), binary=True).fetchall())

    def cursor(self, stream: str) -> Cursor | None:
        """See `Store`."""
        with self._refusing():
            found = self._session.execute(_CURSOR, (stream,)).fetchone()
        return Cursor.of(found) if found else None

    def pending(self, limit: int, after_pos: int = 0) -> list[Send]:
        """See `Store`."""
        with self._refusing(), self._session.cursor(binary=True, row_factory=args_row(Send)) as cursor:
            return cursor.execute(_PENDING, (after_pos, limit)).fetchall()

    def sent(self, up_to_pos: int) -> None:
        """See `Store`."""
        with self._transaction():
            self._session.execute(_SENT, (up_to_pos,))

    def page(self, first: int, last: int) -> list[Row]:
        """See `Store`."""
        with self._refusing():
            return _read_page(self._session, first, last)

    def close(self) -> None:
        """See `Store`. A lease that cannot be given back stays taken until a standby has seen it stand still."""
        with suppress(psycopg.Error):
            lease.release(self._session, self._epoch, self._holder)
        close(self._session)

    def _copy(self, rows: Sequence[Row]) -> None:
        with self._session.cursor() as cursor, cursor.copy(_COPY) as copy:
            copy.set_types(_COPY_TYPES)
            for row in rows:
                copy.write_row(_values(row))

    def _put(
        self,
        sends: Sequence[tuple[int, Outgoing]],
        cursors: Sequence[Cursor],
        routes: Sequence[Route] | None,
        sent_pos: int,
    ) -> None:
        """Everything but the rows, without waiting for the answers one by one."""
        with self._session.pipeline(), self._session.cursor() as cursor:
            if sent_pos:
                cursor.execute(_SENT, (sent_pos,))
            if sends:
                cursor.executemany(_INSERT_SEND, [(pos, send.subject, send.traceparent) for pos, send in sends])
            if cursors:
                cursor.executemany(_UPSERT_CURSOR, list(map(astuple, cursors)))
            if routes is not None:
                cursor.execute(_CLEAR_ROUTES)
            if routes:
                cursor.executemany(_INSERT_ROUTE, list(map(astuple, routes)))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        """Begin with the lease: from here to the commit nobody can take it without ending this session."""
        with self._refusing(), self._session.transaction():
            lease.move(self._session, self._place, self._epoch, self._holder)
            yield

    @contextmanager
    def _refusing(self) -> Generator[None]:
        try:
            yield
        except UniqueViolation:
            raise
        except psycopg.Error as error:
            raise fault(self._place, self._session, error) from error


def source(address: PostgresAddress) -> Source:
    """Open the read-only side of a database; it connects again by itself after a break.

    Raises LedgerMissing when it has no tables or is not there, NotALedger, LedgerTooNew, LedgerUnreachable.
    """
    connection = _engine(address, readonly=True).connect()
    explain = partial(_fault, connection, address.place)
    try:
        if not inspect(connection).get_table_names():
            raise LedgerMissing(address.place)
        require(connection, address.place)
    except DBAPIError as error:
        refusal = explain(error)
        connection.close()
        raise refusal from error
    except BaseException:
        connection.close()
        raise
    return Source(connection, address.place, partial(_page, connection, address.place), explain)


def _page(connection: "Connection", place: str, first: int, last: int) -> list[Row]:
    session = cast("Session", connection.connection.driver_connection)
    try:
        return _read_page(session, first, last)
    except psycopg.Error as error:
        if not session.closed:
            raise NotALedger(place, str(error)) from error
        connection.invalidate(error)
        connection.rollback()
        raise LedgerUnreachable(place, str(error)) from error


def _fault(connection: "Connection", place: str, error: StatementError) -> KiteError:
    if isinstance(error.orig, KiteError):  # it could not connect again
        return error.orig
    if not (isinstance(error, DBAPIError) and error.connection_invalidated):
        return NotALedger(place, str(error.orig))
    connection.rollback()  # or it would not connect again
    return LedgerUnreachable(place, str(error.orig))


def _read_page(session: Session, first: int, last: int) -> list[Row]:
    with session.cursor(binary=True, row_factory=args_row(Row)) as cursor:
        return cursor.execute(_PAGE, (first, last, PAGE_ROWS)).fetchall()


def _engine(address: PostgresAddress, *, readonly: bool = False) -> "Engine":
    return create_engine(
        "postgresql+psycopg://",
        creator=partial(connect, address, readonly=readonly),
        isolation_level="AUTOCOMMIT" if readonly else "READ COMMITTED",
        poolclass=NullPool,
        use_native_hstore=False,
    )


def _is_current(place: str, session: Session) -> bool:
    """Tell whether there is nothing to migrate, without the time that Alembic takes: a standby has a second."""
    try:
        return session.execute(_MIGRATED).fetchone() == (True,) and session.execute(_REVISION).fetchall() == [
            (REVISIONS[-1],)
        ]
    except psycopg.Error as error:
        raise fault(place, session, error) from error


def _migrate(address: PostgresAddress, seen: Lease | None) -> None:
    """Bring the database up to date in one transaction, with nobody else in it who migrates or writes."""
    with _engine(address).connect() as connection:
        try:
            with connection.begin():
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
                _require_free(connection, address.place, seen)
                upgrade(connection, address.place)
        except DBAPIError as error:
            raise _refusal(address.place, error) from error


def _require_free(connection: "Connection", place: str, seen: Lease | None) -> None:
    """An older KITE may be writing. Before there were holders, there was no writer on PostgreSQL."""
    tables = inspect(connection)
    if tables.has_table("lease") and any(column["name"] == "holder" for column in tables.get_columns("lease")):
        lease.free(cast("Session", connection.connection.driver_connection), place, seen)


def _refusal(place: str, error: DBAPIError) -> KiteError:
    if isinstance(error.orig, LockNotAvailable):
        return LedgerHeld(place, "one that migrates it")
    detail = str(error.orig)
    return LedgerUnreachable(place, detail) if error.connection_invalidated else LedgerUnwritable(place, detail)
