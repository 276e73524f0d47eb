"""The simulated bus: facts and decisions come at least once, windows when they do."""

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import NamedTuple, TypeAlias

from kite.testing.simulation.agenda import Agenda
from kite_schemas.arbitration import Transport, TransportChanged
from kite_schemas.model import PPM, Data

LEAST_US, SPREAD_US = 400, 1_800
"""How long a message is on its way, at least, and how much longer most are."""

LATE_PPM, LATE_US = 20_000, 400_000
"""Share of the messages that are late, and by how much at most: others overtake them, but for those of their key."""

AGAIN_PPM, AGAIN_US = 30_000, 3_000_000
"""Share of the messages that come a second time, and how long after the first at most."""

WAITING_MAX = 600
"""Windows that an outlet keeps in reliable transport, as yoco's does."""

RETRY_US = 30_000
"""From a window that was not acknowledged to the next try."""


class Event(NamedTuple):
    """One message: `at_us` is when it was published, by true time."""

    id: str
    subject: str
    data: Data
    at_us: int


Taker: TypeAlias = Callable[[Event], None]


class Line:
    """A stream of facts or decisions: late, doubled and overtaken by those of other keys, never lost.

    `slow_us` is added to every way while the bus is slow; a `fair` line is neither late nor doubles anything. `sent`
    are all messages ever sent, for the judge.
    """

    def __init__(self, agenda: Agenda, rng: Random, *, fair: bool = False) -> None:
        self.slow_us = 0
        self.sent: list[Event] = []
        self._agenda = agenda
        self._rng = rng
        self._fair = fair
        self._last_us: dict[str, int] = {}

    def send(self, key: str, event: Event, take: Taker) -> None:
        """Deliver a message, in order among those of its key."""
        self.sent.append(event)
        due_us = self._agenda.now_us + LEAST_US + self._rng.randrange(SPREAD_US) + self.slow_us
        if not self._fair and self._rng.randrange(PPM) < LATE_PPM:
            due_us += self._rng.randrange(LATE_US)
        due_us = max(due_us, self._last_us.get(key, 0) + 1)
        self._last_us[key] = due_us
        self._agenda.at(due_us, partial(take, event))
        if not self._fair and self._rng.randrange(PPM) < AGAIN_PPM:
            self._agenda.at(due_us + self._rng.randrange(AGAIN_US), partial(take, event))


class Outlet:
    """The windows of one node on their way: fast ones may be lost, reliable ones are tried again until they arrive.

    `reliable` are the sequence numbers that were sent reliably, with the moment of each; they are judged afterwards.
    """

    def __init__(self, agenda: Agenda, rng: Random, take: Taker, *, loss_ppm: int = 0) -> None:
        self.loss_ppm = loss_ppm
        self.slow_us = 0
        self.transport = Transport.FAST
        self.sent = 0
        self.lost = 0
        self.reliable: list[Event] = []
        self._agenda = agenda
        self._rng = rng
        self._take = take
        self._waiting: deque[Event] = deque()
        self._trying = False

    def put(self, window: Event) -> None:
        """Send a window, or queue it: none overtakes one that waits."""
        if self.transport is Transport.FAST and not self._waiting:
            self._try(window)
            return
        if len(self._waiting) >= WAITING_MAX:
            self._waiting.popleft()
        self._waiting.append(window)
        self.reliable.append(window)
        self._next()

    def switch(self, changed: TransportChanged, boot: str) -> None:
        """Let windows travel as decided, if it was decided for this start of the node."""
        if changed.boot == boot:
            self.transport = changed.transport

    def begin(self) -> None:
        """Begin anew, as a node that has started does: what waited is gone with the process."""
        self.transport = Transport.FAST
        gone = {window.id for window in self._waiting}
        self.reliable = [window for window in self.reliable if window.id not in gone]
        self._waiting.clear()

    def _next(self) -> None:
        if self._waiting and not self._trying:
            self._trying = True
            arrived = self._try(self._waiting[0])
            if arrived:
                self._waiting.popleft()
            self._agenda.after(LEAST_US if arrived else RETRY_US, self._again)

    def _again(self) -> None:
        self._trying = False
        self._next()

    def _try(self, window: Event) -> bool:
        """Send once; return whether it arrives."""
        self.sent += 1
        if self._rng.randrange(PPM) < self.loss_ppm:
            self.lost += 1
            return False
        due_us = self._agenda.now_us + LEAST_US + self._rng.randrange(SPREAD_US) + self.slow_us
        self._agenda.at(due_us, partial(self._take, window))
        if self._rng.randrange(PPM) < AGAIN_PPM:
            self._agenda.at(due_us + self._rng.randrange(AGAIN_US), partial(self._take, window))
        return True
