"""Looking at a ledger from any process, while its writer runs."""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from sqlalchemy import ColumnElement, select
from sqlalchemy.exc import StatementError

from kite.ledger.backend import open_source
from kite.ledger.chain import GENESIS, verify
from kite.ledger.errors import ChainBroken, LedgerTooOld
from kite.ledger.port import PAGE_ROWS, Source
from kite.ledger.rows import Cursor, Head, Lease, Route, Row
from kite.ledger.scan import scan
from kite.ledger.schema import revision
from kite.ledger.tables import cursors, lease, ledger, routes

ROUTES_SINCE = "0002"
LEASE_SINCE = "0003"
"""The schema revisions that brought the routes, and the lease's holder and counter."""


class Reader:
    """A ledger open for reading only: it never blocks the writer, and each call sees what is committed by then.

    A reader belongs to the thread that opened it. Every method raises NotALedger when the database cannot be read, and
    LedgerUnreachable when its server does not answer; the next call connects again.
    """

    def __init__(self, source: Source) -> None:
        self._connection = source.connection
        self._place = source.place
        self._page = source.page
        self._fault = source.fault
        self._revision = ""

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the ledger at `url`, which must exist; nothing is created or migrated.

        Raises LedgerMissing, LedgerTooNew, NotALedger, LedgerUnreachable, SqliteTooOld, and UsageError for a URL that
        names no ledger.
        """
        return cls(open_source(url))

    @property
    def head(self) -> Head:
        """The end of the ledger at this moment."""
        newest = select(ledger.c.pos, ledger.c.hash, ledger.c.ledger_us).order_by(ledger.c.pos.desc()).limit(1)
        with self._readable():
            epoch = self._connection.execute(select(lease.c.epoch)).scalar_one()
            last = self._connection.execute(newest).one_or_none()
        pos, digest, ledger_us = last or (0, GENESIS, 0)
        return Head(pos, digest, ledger_us, epoch)

    @property
    def lease(self) -> Lease:
        """Who may write at this moment: what a standby watches.

        On SQLite the file's lock decides, and a holder that was killed stays named here. Raises LedgerTooOld for a
        ledger that no arbitrator of this version has led yet.
        """
        with self._readable():
            self._require(LEASE_SINCE)
            return Lease(*self._connection.execute(select(lease.c.epoch, lease.c.holder, lease.c.counter)).one())

    @property
    def schema(self) -> str:
        """The schema revision of the database, as `kite.ledger.tables.REVISIONS` names them."""
        with self._readable():
            return revision(self._connection) or ""

    def cursor(self, stream: str) -> Cursor | None:
        """Return the last message of a stream that the ledger has consumed, None before the first.

        Raises LedgerTooOld for a ledger that no arbitrator of this version has led yet.
        """
        with self._readable():
            self._require(LEASE_SINCE)
            found = self._connection.execute(select(cursors).where(cursors.c.stream == stream)).one_or_none()
        return None if found is None else Cursor.of((found[0], found[1], found[2], found[3], found[4], found[5]))

    def row(self, pos: int) -> Row | None:
        """Return the row at `pos`, None when there is none yet."""
        return next(self.find(first=pos, last=pos), None)

    def by_event_id(self, event_id: str) -> Row | None:
        """Return the row of one event, None when the ledger does not have it."""
        return next(self._scan(1, None, ledger.c.event_id == event_id), None)

    def rows(self, first: int = 1, last: int | None = None) -> Iterator[Row]:
        """Yield the rows from `first` to `last` (default: the head as of now), holding PAGE_ROWS of them at a time."""
        return scan(self._page, first, self.head.pos if last is None else last)

    def find(
        self,
        *,
        types: Collection[str] = (),
        subjects: Collection[str] = (),
        trace_id: str | None = None,
        first: int = 1,
        last: int | None = None,
    ) -> Iterator[Row]:
        """Yield, by position, the rows that have one of `types`, one of `subjects` and `trace_id`; empty means any."""
        wanted: list[ColumnElement[bool]] = []
        if types:
            wanted.append(ledger.c.type.in_(types))
        if subjects:
            wanted.append(ledger.c.subject.in_(subjects))
        if trace_id is not None:
            wanted.append(ledger.c.trace_id == trace_id)
        return self._scan(first, last, *wanted)

    def routes(self, name: str | None = None) -> list[Route]:
        """Return where requests go, for one served name or for all, by name and instance.

        Raises LedgerTooOld for a ledger that no arbitrator of this version has led yet.
        """
        query = select(routes).order_by(routes.c.name, routes.c.instance)
        with self._readable():
            self._require(ROUTES_SINCE)
            wanted = query if name is None else query.where(routes.c.name == name)
            return [Route(*values) for values in self._connection.execute(wanted)]

    def verify_chain(self, first: int = 1, last: int | None = None) -> None:
        """Check that each position from `first` to `last` is there and unaltered; raises ChainBroken at the first not.

        A tail that was cut off cannot be seen from here: name the `last` position that must be there.
        """
        end = self.head.pos if last is None else last
        proven = first - 1
        for row in verify(self.rows(first, end), after=proven, previous=self._hash_at(proven)):
            proven = row.pos
        if proven < end:
            raise ChainBroken(proven + 1, "missing")

    def close(self) -> None:
        """Let the database go."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hash_at(self, pos: int) -> bytes:
        if pos == 0:
            return GENESIS
        row = self.row(pos)
        if row is None:
            raise ChainBroken(pos, "missing")
        return row.hash

    def _scan(self, first: int, last: int | None, *wanted: ColumnElement[bool]) -> Iterator[Row]:
        def page(start: int, end: int) -> list[Row]:
            query = select(ledger).where(ledger.c.pos.between(start, end), *wanted).order_by(ledger.c.pos)
            with self._readable():
                return [Row(*values) for values in self._connection.execute(query.limit(PAGE_ROWS))]

        return scan(page, first, self.head.pos if last is None else last)

    def _require(self, needed: str) -> None:
        """A ledger is never migrated backwards: what was once seen need not be looked at again."""
        if self._revision < needed:
            self._revision = revision(self._connection) or ""
        if self._revision < needed:
            raise LedgerTooOld(self._place, self._revision or "none", needed)

    @contextmanager
    def _readable(self) -> Generator[None]:
        try:
            yield
        except StatementError as error:
            raise self._fault(error) from error
