"""Looking into a ledger from outside, also at what is its writer's own business: outbox and cursor."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy import func, select
from sqlalchemy.exc import StatementError

from kite.bus import EVT
from kite.ledger import LedgerMissing, LedgerUnreachable, NotALedger, Reader, Row
from kite.ledger.backend import open_source
from kite.ledger.port import Source
from kite.ledger.tables import cursors, outbox

AWAY = (LedgerMissing, LedgerUnreachable, NotALedger)
"""It is being made, or its server is away."""


@dataclass(frozen=True, slots=True)
class Glance:
    """New `rows`, the last position, how many rows wait to be published, and which stream was read up to where."""

    rows: list[Row]
    head: int
    waiting: int
    created: str
    seq: int


class Peek:
    """A ledger that may be away, or not be there yet; from `look` to `close`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._source: Source | None = None

    def look(self, first: int, types: Collection[str]) -> Glance | None:
        """Return what is there from position `first` on, None when the ledger is away."""
        try:
            return self._look(first, types)
        except AWAY:
            self.close()
            return None

    def close(self) -> None:
        """Let the ledger go."""
        if self._source is not None:
            with suppress(StatementError):
                self._source.connection.close()
            self._source = None

    def _look(self, first: int, types: Collection[str]) -> Glance:
        source = self._source = self._source or open_source(self._url)
        reader = Reader(source)
        head = reader.head.pos
        rows = [*reader.find(types=types, first=first, last=head)]
        place = select(cursors.c.created, cursors.c.seq).where(cursors.c.stream == EVT)
        try:
            created, seq = source.connection.execute(place).one_or_none() or ("", 0)
            waiting = source.connection.execute(select(func.count()).select_from(outbox)).scalar_one()
        except StatementError as error:
            raise source.fault(error) from error
        return Glance(rows, head, waiting, created, seq)
