"""One term of leading: pull, decide, commit, publish. One task writes; the others hand it work or see to the rest."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Never

import structlog

from kite import __version__, clock, tracing
from kite.bus import DEC, EVT, FILL_ALARM_PPM, Bus, BusUnreachable, StreamMissing
from kite.errors import Fault, KiteError
from kite.events import Origin, compose, new_id
from kite.ledger import AsyncLedger, Cursor, DuplicateEvent, LeaseLost, LedgerUnreachable, Outgoing, Route, Row, Send
from kite.trust import Keyring, Signer
from kite_arbitrator import core, pace, pulls, shipped
from kite_arbitrator.batch import Batch, Traces
from kite_arbitrator.checkpoints import checkpoint, is_due
from kite_arbitrator.intake import Arrival, Incoming, Intake, Load, ids, is_doubted
from kite_arbitrator.ledgertime import LedgerClock
from kite_arbitrator.metrics import Meter
from kite_arbitrator.relay import Relay
from kite_arbitrator.routes import rerouted, routes
from kite_arbitrator.routing import destination
from kite_arbitrator.state import State
from kite_schemas.envelope import decode
from kite_schemas.ledger import BusEpochChanged, ClockStepped, Created, DeadlineMissed, LeaseTaken, Tick
from kite_schemas.policy import ChangeRequested

RENEW_S = 0.5
"""How often the lease is renewed at least: a sixth of the time in which others wait for it to move."""

BUS_AWAY_US = 5_000_000
"""A leader that the bus has not answered for so long gives the lease back, where a replica may hear it."""

BUS_LOOK_S = 1.0
LEAVE_S = 2.0
"""How long the last checkpoint may take to reach the bus; what does not is published by the next leader."""

ORIGIN = Origin(source="kite/arbitrator/leader", producer=f"arbitrator@{__version__}")

log = structlog.get_logger()


class BusAway(KiteError):
    """This leader cannot reach the bus; perhaps a replica can."""

    code = "bus_away"
    fault = Fault.OPERATOR
    retryable = True

    def __init__(self, url: str, away_us: int) -> None:
        super().__init__(
            f"no bus at {url} for {away_us / clock.US_PER_S:g} s", hint="a replica leads, or this one again"
        )
        self.url = url
        self.away_us = away_us


async def keep(ledger: AsyncLedger) -> Never:
    """Renew the lease for ever: a quiet leader writes nothing that would. Raises LeaseLost."""
    while True:
        await asyncio.sleep(RENEW_S)
        await ledger.renew()


class Leader:
    """Use `run` once. The lease must be kept (`keep`) from before until after."""

    def __init__(
        self,
        bus: Bus,
        ledger: AsyncLedger,
        state: State,
        *,
        holder: str,
        cursor: Cursor,
        keyring: Keyring,
        signer: Signer | None,
        shared: bool,
        now: LedgerClock,
        meter: Meter,
    ) -> None:
        self._bus = bus
        self._ledger = ledger
        self._state = state
        self._holder = holder
        self._cursor = cursor
        self._keyring = keyring
        self._signer = signer
        self._shared = shared
        self._sealed_pos = 0
        self._now = now
        self._meter = meter
        self._intake = Intake()
        self._traces = Traces()
        self._missed: DeadlineMissed | None = None
        self._routed = state
        self._routes: tuple[Route, ...] | None = None
        self._relay = Relay(bus, ledger)
        meter.waiting_us = self._relay.waiting_us

    async def run(self) -> None:
        """Lead until cancelled. Raises LeaseLost, LedgerUnreachable and BusAway when others may do better."""
        await self._begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(pulls.facts(self._bus, self._intake, lambda: self._keyring, self._cursor))
                tasks.create_task(pulls.windows(self._bus, self._intake, lambda: self._keyring))
                for task in (self._tick, self._relay.run, self._write, self._watch):
                    tasks.create_task(task())
        except asyncio.CancelledError:
            with suppress(LeaseLost, LedgerUnreachable):  # whoever cancels wants it to end, also when that fails
                await self._leave()
            raise

    async def _begin(self) -> None:
        head = self._ledger.head
        batch = self._batch({})
        if head.pos == 0:
            batch.write(Created(ledger=new_id(), format=core.FORMAT))
        batch.write(LeaseTaken(epoch=head.epoch, holder=self._holder))
        if self._state.policy is None and head.pos == 0:
            request = ChangeRequested(actor="arbitrator", reason="the shipped policy", policy=shipped.policy())
            batch.put(compose("policy/fleet", request, ORIGIN), request)
        await self._commit(batch)
        await self._give_again()
        log.info("leading", ledger=self._state.ledger, epoch=head.epoch, pos=self._state.pos)

    async def _leave(self) -> None:
        """Sign the end of the ledger, so that nobody can cut it off, and let go what the bus has."""
        if self._signer is not None and self._ledger.head.pos > self._sealed_pos:
            batch = self._batch({})
            batch.announce(checkpoint(self._signer, self._state.ledger, self._ledger.head))
            await self._commit(batch)
            await self._relay.finish(LEAVE_S)
        await self._ledger.sent(self._relay.done_pos)  # the next leader need not publish it again

    async def _tick(self) -> Never:
        """Tick at the pace that the state asks for, which is looked at again in between."""
        ticked_us = clock.mono_us()
        while True:
            due_us = ticked_us + pace.tick_us(self._state) - clock.mono_us()
            if due_us > 0:
                await asyncio.sleep(min(due_us, pace.look_us(self._state)) / clock.US_PER_S)
                continue
            ticked_us = clock.mono_us()
            self._intake.tick()

    async def _watch(self) -> Never:
        """See whether the bus answers, and how full its streams are."""
        while True:
            try:
                async with asyncio.timeout(BUS_AWAY_US / clock.US_PER_S):
                    await self._measure()
            except (TimeoutError, BusUnreachable) as error:
                self._meter.streams = ()
                if self._shared:
                    raise BusAway(self._bus.url, BUS_AWAY_US) from error
            await asyncio.sleep(BUS_LOOK_S)

    async def _measure(self) -> None:
        try:
            found = [await self._bus.stream(stream) for stream in (EVT, DEC)]
        except StreamMissing as error:
            log.debug("bus_not_measured", error=str(error))
            return
        self._meter.streams = found
        self._meter.behind = max(0, found[0].last_seq - self._cursor.seq)
        for one in found:
            if one.fill_ppm > FILL_ALARM_PPM:
                log.warning("bus_filling", stream=one.stream, fill_ppm=one.fill_ppm, limit_bytes=one.limit_bytes)

    async def _write(self) -> Never:
        while True:
            load = await self._intake.take()
            began_us = clock.mono_us()
            try:
                known = await self._ledger.known(ids(load)) if is_doubted(load) else {}
                batch = await self._serve(load, known)
            except DuplicateEvent:
                # Rare, and the core is pure: look up what is known, and decide again (a trace shows both attempts).
                batch = await self._serve(load, await self._ledger.known(ids(load)))
            now_us = clock.mono_us()
            self._missed = batch.missed(now_us)
            self._meter.decided(now_us - one.came_us for one in batch.decided)
            if batch.decided:
                log.info("decided", rows=len(batch.drafts), decisions=len(batch.decided), took_us=now_us - began_us)

    async def _serve(self, load: Load, known: dict[str, bytes]) -> Batch:
        """Decide what follows from a load and commit it. Raises DuplicateEvent when an event not in `known` is."""
        batch = self._batch(known)
        head = self._ledger.head
        signer = self._signer if is_due(head.pos, self._sealed_pos) else None
        if signer is not None:
            batch.announce(checkpoint(signer, self._state.ledger, head))
        if self._missed is not None:
            batch.write(self._missed)
        if load.tick:
            self._pass_time(batch)
        cursor = self._take(batch, load)
        with _traced(batch):
            await self._commit(batch, cursor, quiet=not (load.tick or load.facts or batch.decided))
        if signer is not None:
            self._sealed_pos = head.pos
        if any(isinstance(item, BusEpochChanged) for item in load.facts):
            await self._give_again()
        return batch

    def _pass_time(self, batch: Batch) -> None:
        by_us = self._now.stepped()
        if by_us:
            log.warning("clock_stepped", by_us=by_us)
            batch.write(ClockStepped(by_us=by_us))
        batch.write(Tick())

    def _take(self, batch: Batch, load: Load) -> Cursor:
        """Take in facts, then windows; return how far the facts have come."""
        cursor = self._cursor
        for item in load.facts:
            cursor = _fact(batch, item, cursor)
        for arrival in load.windows:
            batch.take(arrival)
        return cursor

    async def _commit(self, batch: Batch, cursor: Cursor | None = None, *, quiet: bool = False) -> None:
        """Append the batch; after a `quiet` one, of windows that decided nothing, the routes are the same."""
        state, found = batch.state, self._routes
        if not quiet and (found is None or rerouted(self._routed, state)):
            found = routes(state)
        moved = cursor is not None and cursor != self._cursor
        rows = await self._ledger.append(
            batch.drafts,
            sends=batch.sends,
            cursors=[cursor] if cursor is not None and moved else [],
            routes=None if found == self._routes else found,
            sent_pos=self._relay.done_pos,
        )
        self._state, self._keyring = state, batch.keyring
        self._meter.state = state
        self._cursor = cursor or self._cursor
        if not quiet:
            self._routed, self._routes = state, found
        if batch.sends:
            self._relay.put([_send(rows[send.draft], send) for send in batch.sends])

    async def _give_again(self) -> None:
        """Publish the open orders once more: a bus that was restored or replaced may have lost them.

        Workers carry out each of them once, whatever comes how often.
        """
        known = await self._ledger.known(list(self._state.orders))
        self._relay.again([_again(raw) for raw in known.values()])

    def _batch(self, known: dict[str, bytes]) -> Batch:
        return Batch(self._state, self._now, ORIGIN, self._cursor.bus_epoch, self._keyring, known, self._traces)


@contextmanager
def _traced(batch: Batch) -> Generator[None]:
    """Show the commit of a batch that decided something as a trace of its own, with a link to each decision.

    Windows alone come ten times a second from each node: they are no spans.
    """
    if not batch.decided:
        yield
        return
    attributes = {"kite.rows": len(batch.drafts), "kite.decisions": len(batch.decided)}
    links = [send.traceparent for send in batch.sends if send.traceparent]
    with tracing.span("commit batch", links=links, attributes=attributes):
        yield


def _fact(batch: Batch, item: Incoming, cursor: Cursor) -> Cursor:
    """Take in one item of the line of facts, and return where the bus stands after it."""
    if isinstance(item, Arrival):
        batch.take(item)
        last = item.messages[-1]
        return replace(cursor, seq=last.seq, msg_id=last.msg_id, published_us=last.published_us)
    batch.write(item)
    if isinstance(item, BusEpochChanged):
        batch.bus_epoch = item.bus_epoch
        return Cursor(stream=cursor.stream, bus_epoch=item.bus_epoch, seq=0, msg_id="", created=item.found)
    return replace(cursor, seq=item.last, msg_id="", published_us=0)


def _again(raw: bytes) -> Send:
    """Return a decision of this ledger as it was published before."""
    header, data = (event := decode(raw)).header, event.data
    decision = core.Row(pos=0, id=header.id, type=header.type, subject=header.subject, ledger_us=0, data=data)
    return Send(0, destination(decision), raw, header.id, header.traceparent or "")


def _send(row: Row, outgoing: Outgoing) -> Send:
    return Send(row.pos, outgoing.subject, row.raw, row.event_id, outgoing.traceparent)
