"""Seeing from outside whether a fleet has come to rest."""

from kite.bus import StreamState
from kite.testing.faults.peek import Peek
from kite_arbitrator import core
from kite_arbitrator.reading import LASTING, read
from kite_schemas.yoco import State as Life

TICKS = 2
"""So many ticks behind the last row that stays, and nothing follows from it any more."""


class Watch:
    """The state as the ledger says it at the last `look`; a ledger that is away is not at rest."""

    def __init__(self, url: str) -> None:
        self.state = core.initial()
        self._peek = Peek(url)
        self._waiting = 0
        self._pos = 0
        self._last = 0

    def look(self, facts: StreamState | None) -> bool:
        """Tell whether all is at rest: all `facts` read, every order over, every decision on the bus, nothing to come.

        `facts` is what the bus holds, or held a moment ago; None is not known.
        """
        seen = self._peek.look(self._pos + 1, LASTING)
        if seen is None:
            return False
        for row in seen.rows:
            self.state = core.evolve(self.state, read(row))
            self._last = row.pos
        self._pos, self._waiting = seen.head, seen.waiting
        state = self.state
        idle = not (state.orders or state.gap_pos or state.degraded or seen.waiting)
        consumed = facts is not None and (seen.created, seen.seq) == (facts.created, facts.last_seq)
        return idle and consumed and self._pos >= self._last + TICKS

    @property
    def sleepers(self) -> int:
        """How many instances can be woken."""
        return sum(instance.state is Life.ASLEEP for instance in self.state.instances.values())

    def close(self) -> None:
        """Let the ledger go."""
        self._peek.close()

    def __str__(self) -> str:
        """Say what is not at rest."""
        state = self.state
        orders = ", ".join(f"{order.type} {order.target}" for order in state.orders.values())
        return f"at {self._pos}: orders [{orders}], gap {state.gap_pos}, {self._waiting} in the outbox"
