"""The seam between the ledger and a database: what a backend does, and nothing about hashes or positions."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import StatementError

from kite.errors import KiteError
from kite.ledger.rows import Cursor, Head, Outgoing, Route, Row, Send
from kite.ledger.scan import Page

PAGE_ROWS = 500
"""How many rows a scan holds in memory at once."""


@dataclass(frozen=True, slots=True)
class Source:
    """The read-only side of one database: queries go to `connection`, whole rows are read by `page`.

    `fault` turns a refusal of the database into an error of ours.
    """

    connection: Connection
    place: str
    page: Page
    fault: Callable[[StatementError], KiteError]


class Store(Protocol):
    """The read-write side of one database, held by one writer. `kite.testing.ledger` has the contract every one keeps.

    Every method may raise LedgerUnwritable, and where there is a server LedgerUnreachable. Reads see what this store
    has written. `write`, `sent` and `renew` move the lease's counter in their transaction, and raise LeaseLost when the
    lease is no longer this store's: nothing was written then.
    """

    def take(self) -> Head:
        """Make the lease this store's: count its epoch up, durably, and return the head under the new epoch.

        Raises LedgerHeld when another has it.
        """
        ...

    def renew(self) -> None:
        """Move the lease's counter, so that nobody takes the writer for dead."""
        ...

    def write(
        self,
        rows: Sequence[Row],
        sends: Sequence[tuple[int, Outgoing]],
        cursors: Sequence[Cursor],
        routes: Sequence[Route] | None = None,
        sent_pos: int = 0,
    ) -> None:
        """Write rows, outbox (with positions) and cursors in one durable transaction, all or nothing.

        `routes` take the place of all that are there; None leaves those alone. Everything up to `sent_pos` leaves the
        outbox. Raises DuplicateEvent for an event id that is there already, in the ledger or twice in `rows`.
        """
        ...

    def known(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the raw bytes of those of `event_ids` that the ledger has."""
        ...

    def cursor(self, stream: str) -> Cursor | None:
        """Return where `stream` was last consumed."""
        ...

    def pending(self, limit: int, after_pos: int = 0) -> list[Send]:
        """Return the first `limit` rows of the outbox behind `after_pos`, by position."""
        ...

    def sent(self, up_to_pos: int) -> None:
        """Take everything up to `up_to_pos` out of the outbox."""
        ...

    def page(self, first: int, last: int) -> list[Row]:
        """Return the first PAGE_ROWS rows at positions `first` to `last`, both included."""
        ...

    def close(self) -> None:
        """Give the database and its lease back, as far as that can still be done. Raises nothing."""
        ...


def repeated(rows: Sequence[Row], known: Callable[[Sequence[str]], dict[str, bytes]]) -> str | None:
    """Return the first event id of `rows` that is among the `known`, or twice in `rows`; None when all are new."""
    ids = [row.event_id for row in rows]
    taken, counts = known(ids), Counter(ids)
    return next((event_id for event_id in ids if event_id in taken or counts[event_id] > 1), None)
