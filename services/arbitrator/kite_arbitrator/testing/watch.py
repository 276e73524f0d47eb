"""Seeing from outside whether a fleet has come to rest."""

from contextlib import suppress

from sqlalchemy import func, select
from sqlalchemy.exc import StatementError

from kite.ledger import LedgerMissing, LedgerUnreachable, NotALedger, Reader
from kite.ledger.backend import open_source
from kite.ledger.port import Source
from kite.ledger.tables import outbox
from kite_arbitrator import core
from kite_arbitrator.reading import LASTING, read
from kite_schemas.yoco import State as Life

TICKS = 2
"""So many ticks behind the last row that stays, and nothing follows from it any more."""

AWAY = (LedgerMissing, LedgerUnreachable, NotALedger, StatementError)
"""It is being made, or its server is away."""


class Watch:
    """The state as its ledger says it at the last `look`; a ledger that is away is not at rest."""

    def __init__(self, url: str) -> None:
        self.state = core.initial()
        self.waiting = 0
        self._url = url
        self._source: Source | None = None
        self._pos = 0
        self._last = 0

    def look(self) -> bool:
        """Tell whether all is at rest: every order over, every decision on the bus, nothing else to come."""
        try:
            self._look(self._opened())
        except AWAY:
            self.close()
            return False
        state = self.state
        idle = not (state.orders or state.gap_pos or state.degraded or self.waiting)
        return idle and self._pos >= self._last + TICKS

    @property
    def sleepers(self) -> int:
        """How many instances can be woken."""
        return sum(instance.state is Life.ASLEEP for instance in self.state.instances.values())

    def close(self) -> None:
        """Let the ledger go."""
        if self._source is not None:
            with suppress(StatementError):
                self._source.connection.close()
            self._source = None

    def __str__(self) -> str:
        """Say what is not at rest."""
        state = self.state
        orders = ", ".join(f"{order.type} {order.target}" for order in state.orders.values())
        return f"at {self._pos}: orders [{orders}], gap {state.gap_pos}, {self.waiting} in the outbox"

    def _opened(self) -> Source:
        if self._source is None:
            self._source = open_source(self._url)
        return self._source

    def _look(self, source: Source) -> None:
        reader = Reader(source)
        head = reader.head.pos
        for row in reader.find(types=LASTING, first=self._pos + 1, last=head):
            self.state = core.evolve(self.state, read(row))
            self._last = row.pos
        self._pos = head
        self.waiting = source.connection.execute(select(func.count()).select_from(outbox)).scalar_one()
