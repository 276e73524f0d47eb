"""Folding a ledger that somebody else writes: how a replica keeps up, and how a leader gets its state."""

from typing import Self

from msgspec import structs

from kite.errors import Fault, KiteError
from kite.ledger import Head, Lease, Reader
from kite.ledger import Row as LedgerRow
from kite_arbitrator import core
from kite_arbitrator.reading import LASTING, read
from kite_arbitrator.records import Row
from kite_schemas.envelope import MalformedEvent
from kite_schemas.ledger import ProducerKeyAdded


class RowUnreadable(KiteError):
    """A row of the ledger is no event any more. What would follow from it is not known, so nobody leads."""

    code = "row_unreadable"
    fault = Fault.OPERATOR

    def __init__(self, pos: int, detail: str) -> None:
        super().__init__(
            f"the ledger's row at position {pos} is no event: {detail}",
            hint="`kite ledger verify` names all that is wrong; restore the ledger from a copy",
        )
        self.pos = pos
        self.detail = detail


class Follower:
    """The state as of the rows seen so far, and the keys among them. It belongs to the thread that opened it.

    Only rows that stay are folded: the next row will be a lease, which forgets what windows said.
    """

    def __init__(self, reader: Reader) -> None:
        self.keys: list[ProducerKeyAdded] = []
        self._reader = reader
        self._state = core.initial()
        self._pos = 0

    @classmethod
    def open(cls, url: str) -> Self:
        """Open the ledger at `url`. Raises the errors of `Reader.open`."""
        return cls(Reader.open(url))

    def look(self) -> Lease:
        """Fold what is new and return the lease as it is now."""
        self._fold(self._reader.head.pos)
        return self._reader.lease

    def finish(self, head: Head) -> core.State:
        """Fold up to `head` and return the state there."""
        self._fold(head.pos)
        return structs.replace(self._state, pos=head.pos, now_us=head.ledger_us)

    def close(self) -> None:
        """Let the ledger go."""
        self._reader.close()

    def _fold(self, last: int) -> None:
        for stored in self._reader.find(types=LASTING, first=self._pos + 1, last=last):
            row = _readable(stored)
            if isinstance(row.data, ProducerKeyAdded):
                self.keys.append(row.data)
            self._state = core.evolve(self._state, row)
        self._pos = last


def _readable(stored: LedgerRow) -> Row:
    try:
        return read(stored)
    except MalformedEvent as error:
        raise RowUnreadable(stored.pos, str(error)) from error
