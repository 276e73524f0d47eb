"""The ledger's one writer: it gives drafts their position, epoch and hash, and appends them with outbox and cursors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kite.ledger.backend import here, open_store
from kite.ledger.chain import seal
from kite.ledger.errors import DraftRefused
from kite.ledger.port import Store
from kite.ledger.rows import Cursor, Draft, Head, Lease, Outgoing, Route, Row, Send
from kite.ledger.scan import scan


class Ledger:
    """A ledger open for writing; there is at most one at a time over all processes.

    A ledger belongs to the thread that opened it (`AsyncLedger` gives it one). After LedgerUnwritable, LeaseLost and
    LedgerUnreachable it must be closed. A commit whose answer was lost is LedgerUnreachable too: who opens the ledger
    again sees in the head whether it happened.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._head = store.take()

    @classmethod
    def open(cls, url: str, *, holder: str | None = None, seen: Lease | None = None) -> Self:
        """Take the lease of the ledger at `url` for `holder` (default: `here()`), migrate it, count its epoch up.

        A free lease is taken at once. On PostgreSQL, one that another holds is taken when it is still as it was `seen`,
        which the caller has watched stand still; on SQLite the lock of a file is the lease, free as soon as its process
        ends. Raises LedgerHeld while another writer has it, LedgerMissing when the server has no such database,
        LedgerTooNew, NotALedger, LedgerUnwritable, LedgerUnreachable, SqliteTooOld, and UsageError for a URL that names
        no ledger. On every error the lease is as before.
        """
        store = open_store(url, holder or here(), seen)
        try:
            return cls(store)
        except BaseException:
            store.close()
            raise

    @property
    def head(self) -> Head:
        """The end of the ledger as of the last append."""
        return self._head

    def append(
        self,
        drafts: Sequence[Draft],
        *,
        sends: Sequence[Outgoing] = (),
        cursors: Sequence[Cursor] = (),
        routes: Sequence[Route] | None = None,
        sent_pos: int = 0,
    ) -> list[Row]:
        """Write rows, outbox and cursors in one durable transaction, and return the rows as they now stand.

        `routes`, unless None, take the place of all that are there; the outbox is let go up to `sent_pos`, see `sent`.
        Raises DuplicateEvent or DraftRefused, and then the ledger is as before and usable; otherwise LeaseLost,
        LedgerUnwritable or LedgerUnreachable.
        """
        rows = seal(self._head, drafts)
        self._store.write(rows, _positions(rows, sends), cursors, routes, sent_pos)
        if rows:
            last = rows[-1]
            self._head = replace(self._head, pos=last.pos, hash=last.hash, ledger_us=last.ledger_us)
        return rows

    def known(self, event_ids: Sequence[str]) -> dict[str, bytes]:
        """Return the raw bytes of those of `event_ids` that are in the ledger.

        Equal bytes are a duplicate, other bytes a conflict.
        """
        return self._store.known(event_ids)

    def cursor(self, stream: str) -> Cursor | None:
        """Return the last message of `stream` that was consumed, None before the first."""
        return self._store.cursor(stream)

    def pending(self, limit: int, after_pos: int = 0) -> list[Send]:
        """Return the first `limit` rows of the outbox behind `after_pos`, by position."""
        return self._store.pending(limit, after_pos)

    def sent(self, up_to_pos: int) -> None:
        """Take every send up to `up_to_pos` out of the outbox: the bus has acknowledged them all.

        A crash before this publishes them again, under the same ids.
        """
        self._store.sent(up_to_pos)

    def renew(self) -> None:
        """Move the lease's counter; appends do it too. Raises LeaseLost when another has taken the lease."""
        self._store.renew()

    def rows(self, first: int = 1, last: int | None = None) -> Iterator[Row]:
        """Yield the rows from `first` to `last` (default: the head as of now), holding PAGE_ROWS of them at a time."""
        return scan(self._store.page, first, self._head.pos if last is None else last)

    def close(self) -> None:
        """Give the ledger to the next writer. Closing twice is harmless."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _positions(rows: Sequence[Row], sends: Sequence[Outgoing]) -> list[tuple[int, Outgoing]]:
    """Turn each send's index into a position; each draft is sent once at most."""
    placed: dict[int, Outgoing] = {}
    for send in sends:
        if not 0 <= send.draft < len(rows):
            raise DraftRefused(send.draft, f"it is to be sent to {send.subject}, and is not in the append")
        if placed.setdefault(rows[send.draft].pos, send) is not send:
            raise DraftRefused(send.draft, f"it is to be sent twice, to {send.subject} too")
    return list(placed.items())
