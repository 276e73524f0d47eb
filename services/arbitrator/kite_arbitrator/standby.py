"""Getting to lead: at once when nobody holds the ledger, else by watching its holder until it no longer moves."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar

import structlog

from kite import clock
from kite.bus import EVT, Bus, BusUnreachable, StreamMissing
from kite.ledger import AsyncLedger, Head, Lease, LedgerHeld, LedgerUnreachable, is_shared
from kite_arbitrator.follower import Follower
from kite_arbitrator.state import State
from kite_schemas.ledger import ProducerKeyAdded

LEASE_US = 3_000_000
"""A holder that has not moved its counter for so long, by the monotonic clock of whoever watches, has lost it."""

LOOK_S = 0.1
ANSWER_S = 1.0
"""How long a bus may take to answer whoever wants to lead on it."""

T = TypeVar("T")

log = structlog.get_logger()


class Patience:
    """Decides when a lease is free. Pure: the caller brings what it sees and the time."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._seen: Lease | None = None
        self._since_us = 0

    def over(self, lease: Lease | None, now_us: int) -> bool:
        """Tell whether the lease may be taken: given back, our own from before, or standing still for LEASE_US.

        None is a lease that cannot be read, perhaps by its holder neither: what follows is waited for anew.
        """
        if lease is None or lease != self._seen:
            self._seen, self._since_us = lease, now_us
        if lease is None:
            return False
        return lease.holder in {"", self._holder} or now_us - self._since_us >= LEASE_US


class Standby:
    """Waits for the lease of one ledger and folds it meanwhile, on a thread of its own. `async with Standby(...)`."""

    def __init__(self, url: str, holder: str, bus: Bus) -> None:
        self._url = url
        self._holder = holder
        self._bus = bus
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kite-follower")
        self._follower: Follower | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._run(self._forget)
        self._pool.shutdown(wait=True)

    async def win(self, *, patient: bool) -> AsyncLedger:
        """Return the ledger once it is ours and the bus answers.

        Raises LedgerHeld at once where a ledger has no replicas (SQLite). The first time it may also turn out that the
        ledger cannot be opened, which is raised; one that is only away is waited for by the `patient`, and once seen.
        """
        await self._bus_there()
        try:
            return await self._open(None)
        except LedgerHeld as held:
            if not is_shared(self._url):
                raise
            log.info("standing_by", holder=held.holder)
        except LedgerUnreachable as error:
            if not patient:
                raise
            log.warning("ledger_away", error=str(error))
        while True:
            seen = await self._outwait()
            with suppress(LedgerHeld, LedgerUnreachable):  # another was quicker, or it is away: looking will tell
                return await self._open(seen)

    async def state(self, head: Head) -> tuple[State, list[ProducerKeyAdded]]:
        """Return the state at the end of the ledger that was won, and the keys that it trusts."""

        def finish() -> tuple[State, list[ProducerKeyAdded]]:
            follower = self._following()
            found = follower.finish(head), follower.keys
            self._forget()
            return found

        return await self._run(finish)

    async def _open(self, seen: Lease | None) -> AsyncLedger:
        return await AsyncLedger.open(self._url, holder=self._holder, seen=seen)

    async def _outwait(self) -> Lease:
        """Follow until the lease may be taken, and the bus is there to lead on."""
        patience = Patience(self._holder)
        while True:
            lease = await self._run(self._look)
            if patience.over(lease, clock.mono_us()) and lease is not None and await self._hears():
                return lease
            await asyncio.sleep(LOOK_S)

    async def _bus_there(self) -> None:
        """Wait for it: who has just left its bus must not take the lease from under one that has it."""
        while True:
            if await self._hears():
                return
            await asyncio.sleep(LOOK_S)

    async def _hears(self) -> bool:
        """Tell whether the bus answers: a connection that stands is none yet, when the network swallows everything."""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._bus.stream(EVT)
        except (TimeoutError, BusUnreachable):
            return False
        except StreamMissing:  # the leader will make it again
            return True
        return True

    def _look(self) -> Lease | None:
        """Follow a step and return the lease, None while the ledger is away: then all of it is read again after."""
        known = self._follower is not None
        try:
            return self._following().look()
        except LedgerUnreachable as error:
            (log.warning if known else log.debug)("ledger_away", error=str(error))
            self._forget()
            return None

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _following(self) -> Follower:
        if self._follower is None:
            self._follower = Follower.open(self._url)
        return self._follower

    def _forget(self) -> None:
        if self._follower is not None:
            self._follower.close()
            self._follower = None
