"""The outbox on its way to the bus: in order of position, from memory when it can be, from the ledger when it must.

The ledger's outbox is the truth. What has just been committed is handed over as well, so that publishing it costs no
reading; and what the bus has acknowledged leaves the outbox with the next append, which costs no transaction of its
own. A crash in between publishes it again, under the same ids.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Never

import structlog

from kite import clock
from kite.bus import Bus, Outgoing, PubAck
from kite.ledger import AsyncLedger, Send

SENDS_MAX = 256
"""How many sends wait in memory, and are published at once; beyond it they are read from the ledger."""

RETRY_S = 1.0

log = structlog.get_logger()


class Relay:
    """One per leader; `run` publishes, `put` hands over. `done_pos` is the last position that the bus has."""

    def __init__(self, bus: Bus, ledger: AsyncLedger) -> None:
        self.done_pos = 0
        self._bus = bus
        self._ledger = ledger
        self._fresh: deque[Send] = deque()
        self._again: Sequence[Send] = ()
        self._behind = True  # the outbox may hold what is not in memory: at first, what a crash left there
        self._wake = asyncio.Event()
        self._since_us: int | None = None  # since when what waits got nowhere, None when nothing waits

    def waiting_us(self) -> int:
        """Return for how long something has waited while the bus acknowledged nothing; 0 when nothing waits."""
        since_us = self._since_us
        return 0 if since_us is None else clock.mono_us() - since_us

    def put(self, sends: Sequence[Send]) -> None:
        """Hand over what has just been committed."""
        if len(self._fresh) + len(sends) > SENDS_MAX:
            self._behind = True
        if not self._behind:
            self._fresh.extend(sends)
        self._begin()

    def again(self, sends: Sequence[Send]) -> None:
        """Publish once more what the bus may have lost, before anything else; the outbox knows nothing of it."""
        self._again = tuple(sends)
        self._begin()

    def _begin(self) -> None:
        self._since_us = clock.mono_us() if self._since_us is None else self._since_us
        self._wake.set()

    async def run(self) -> Never:
        """Publish for ever. Raises the bus's error for what can never be published."""
        self._begin()
        while True:
            await self._drain()
            self._wake.clear()
            await self._wake.wait()

    async def finish(self, wait_s: float) -> None:
        """Publish what is there and return, at the latest after `wait_s`. Call it when `run` has ended."""
        self._behind = True  # the end of `run` may have dropped what it was publishing
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._drain()

    async def _drain(self) -> None:
        while True:
            if self._again:
                await self._repeat(self._again)
            elif sends := await self._next():
                done = await self._publish(sends)
                self.done_pos = sends[done - 1].pos if done else self.done_pos
            else:
                self._since_us = None
                return

    async def _repeat(self, sends: Sequence[Send]) -> None:
        done = await self._publish(sends)
        if self._again is sends:  # not asked for anew meanwhile
            self._again = sends[done:]

    async def _next(self) -> list[Send]:
        if not self._behind:
            fresh = [send for send in self._fresh if send.pos > self.done_pos]
            self._fresh.clear()
            return fresh
        self._behind = False  # first: what is put while the ledger is read must not be missed
        self._fresh.clear()
        sends = await self._ledger.pending(SENDS_MAX, after_pos=self.done_pos)
        self._behind = self._behind or len(sends) == SENDS_MAX
        return sends or await self._next()

    async def _publish(self, sends: Sequence[Send]) -> int:
        """Publish in order and return how many the bus has; after a failure the rest is read from the ledger again."""
        outcomes = await self._bus.publish_many([_outgoing(send) for send in sends])
        failures = [outcome for outcome in outcomes if not isinstance(outcome, PubAck)]
        if isinstance(outcomes[0], PubAck):
            self._since_us = clock.mono_us()
        if failures and not failures[0].retryable:
            raise failures[0]
        if failures:
            log.warning("publish_waits", error=str(failures[0]))
            self._behind = True
            await asyncio.sleep(RETRY_S)
        return outcomes.index(failures[0]) if failures else len(outcomes)


def _outgoing(send: Send) -> Outgoing:
    headers = {"traceparent": send.traceparent} if send.traceparent else {}
    return Outgoing(send.subject, send.payload, send.event_id, headers)
