"""The seam between the ledger and a database: what a backend does, and nothing about hashes or positions."""

from collections.abc import Sequence
from typing import Protocol

from kite.ledger.rows import Cursor, Head, Outgoing, Route, Row, Send

PAGE_ROWS = 500
"""How many rows a scan holds in memory at once."""


class Store(Protocol):
    """The read-write side of one database, held by one writer. `kite.testing.ledger` has the contract every one keeps.

    Every method may raise LedgerUnwritable. Reads see what this store has written.
    """

    def take(self) -> Head:
        """Count the lease's epoch up, durably, and return the head under the new epoch."""
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
        """Give the database and its lease back."""
        ...
