"""The arbitrator's life: rebuild the state from the ledger, then pull, decide, commit, publish."""

import asyncio
import os
import socket
from contextlib import aclosing
from typing import Never

import structlog
from msgspec import structs

from kite import __version__, clock
from kite.bus import EVT, TEL, Bus, BusGap, BusUnreachable, StreamChanged, StreamMissing, StreamState
from kite.errors import Fault, KiteError
from kite.events import Origin, compose, new_id
from kite.ledger import AsyncLedger, Cursor, DuplicateEvent, Head, Outgoing, Reader, Route, Row, Send
from kite_arbitrator import core, pace, shipped
from kite_arbitrator.batch import Batch, Traces
from kite_arbitrator.intake import WINDOWS_MAX, Intake, Load, arrive, ids
from kite_arbitrator.reading import LASTING, read
from kite_arbitrator.relay import Relay
from kite_arbitrator.routes import rerouted, routes
from kite_arbitrator.settings import Settings
from kite_arbitrator.state import State
from kite_schemas.ledger import BusGap as GapRow
from kite_schemas.ledger import Created, DeadlineMissed, LeaseTaken, Tick
from kite_schemas.policy import ChangeRequested

BUS_EPOCH = 1
"""Which life of the bus this is; a bus that was replaced under a ledger is refused for now."""

ORIGIN = Origin(source="kite/arbitrator/leader", producer=f"arbitrator@{__version__}")

log = structlog.get_logger()


class BusReplaced(KiteError):
    """The bus is not the one whose events this ledger holds."""

    code = "bus_replaced"
    fault = Fault.OPERATOR

    def __init__(self, cursor: Cursor, found: str) -> None:
        super().__init__(
            f"the ledger has read {cursor.stream} up to message {cursor.seq} ({cursor.event_id}), the bus has {found}",
            hint="give the arbitrator the bus that belongs to this ledger, or begin a new ledger",
        )
        self.cursor = cursor
        self.found = found


class LedgerClock:
    """Ledger time: never backwards, and a monotonic clock between two leases, whatever the wall clock does."""

    def __init__(self, last_us: int) -> None:
        self._anchor_us = max(clock.wall_us(), last_us) - clock.mono_us()

    def __call__(self, last_us: int) -> int:
        """Return the time of the next row after one at `last_us`."""
        return max(last_us + 1, self._anchor_us + clock.mono_us())


class Arbitrator:
    """Use `serve`. One task writes; the others hand it work or publish what it has committed."""

    def __init__(self, bus: Bus, ledger: AsyncLedger, state: State, stream: StreamState) -> None:
        self._bus = bus
        self._ledger = ledger
        self._state = state
        self._stream = stream
        self._now = LedgerClock(ledger.head.ledger_us)
        self._intake = Intake()
        self._traces = Traces()
        self._missed: DeadlineMissed | None = None
        self._routed = state
        self._routes: tuple[Route, ...] | None = None
        self._relay = Relay(bus, ledger)

    async def run(self) -> None:
        """Take the lease and serve until cancelled."""
        await self._begin()
        try:
            async with asyncio.TaskGroup() as tasks:
                for task in (self._pull_facts, self._pull_windows, self._tick, self._relay.run, self._write):
                    tasks.create_task(task())
        except asyncio.CancelledError:
            await self._ledger.sent(self._relay.done_pos)  # the next leader need not publish it again
            raise

    async def _begin(self) -> None:
        head = self._ledger.head
        batch = self._batch({})
        if head.pos == 0:
            ledger = Created(ledger=new_id(), format=core.FORMAT)
            batch.write(ledger)
        holder = f"{socket.gethostname()}:{os.getpid()}"
        batch.write(LeaseTaken(epoch=head.epoch, holder=holder))
        if self._state.policy is None and head.pos == 0:
            request = ChangeRequested(actor="arbitrator", reason="the shipped policy", policy=shipped.policy())
            batch.put(compose("policy/fleet", request, ORIGIN), request)
        await self._commit(batch)
        log.info("leading", ledger=self._state.ledger, epoch=head.epoch, pos=self._state.pos)

    async def _pull_facts(self) -> Never:
        """Pull from the cursor; what can no longer be read is a row of its own."""
        cursor = await self._ledger.cursor(EVT)
        seq = cursor.seq if cursor else 0
        while True:
            try:
                async with aclosing(self._bus.pull(EVT, seq)) as batches:
                    async for messages in batches:
                        await self._intake.fact(arrive(messages))
                        seq = messages[-1].seq
            except BusGap as gap:
                log.error("bus_gap", stream=EVT, first=gap.first_seq, last=gap.last_seq)
                await self._intake.fact(GapRow(stream=EVT, first=gap.first_seq, last=gap.last_seq))
                seq = gap.last_seq

    async def _pull_windows(self) -> Never:
        """Pull from the end: what came while nobody led is old news. What is lost is lost, and its source counts it."""
        while True:
            try:
                await self._follow_windows((await self._bus.stream(TEL)).last_seq)
            except StreamMissing:
                log.warning("telemetry_stream_missing", stream=TEL)
                await self._bus.provision()
            except (StreamChanged, BusUnreachable) as error:
                log.warning("telemetry_interrupted", stream=TEL, error=str(error))

    async def _follow_windows(self, seq: int) -> Never:
        while True:
            try:
                async with aclosing(self._bus.pull(TEL, seq, batch=WINDOWS_MAX)) as batches:
                    async for messages in batches:
                        await self._intake.window(arrive(messages))
                        seq = messages[-1].seq
            except BusGap as gap:
                log.info("windows_lost", stream=TEL, first=gap.first_seq, last=gap.last_seq)
                seq = gap.last_seq

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

    async def _write(self) -> Never:
        while True:
            load = await self._intake.take()
            began_us = clock.mono_us()
            try:
                batch = await self._serve(load, {})
            except DuplicateEvent:
                # Rare, and the core is pure: look up what is known, and decide again (a trace shows both attempts).
                batch = await self._serve(load, await self._ledger.known(ids(load)))
            now_us = clock.mono_us()
            self._missed = batch.missed(now_us)
            if batch.decided:
                log.info("decided", rows=len(batch.drafts), decisions=len(batch.decided), took_us=now_us - began_us)

    async def _serve(self, load: Load, known: dict[str, bytes]) -> Batch:
        """Decide what follows from a load and commit it. Raises DuplicateEvent when an event not in `known` is."""
        batch = self._batch(known)
        if self._missed is not None:
            batch.write(self._missed)
        if load.tick:
            batch.write(Tick())
        cursors = self._take(batch, load)
        await self._commit(batch, *cursors, quiet=not (load.tick or load.facts or batch.decided))
        return batch

    def _take(self, batch: Batch, load: Load) -> list[Cursor]:
        """Take in facts, then windows; return how far the facts have come."""
        cursors: list[Cursor] = []
        for item in load.facts:
            if isinstance(item, GapRow):
                batch.write(item)
                cursors = [self._cursor(item.last, "")]
            else:
                batch.take(item)
                cursors = [self._cursor(item.messages[-1].seq, item.messages[-1].msg_id or "")]
        for arrival in load.windows:
            batch.take(arrival)
        return cursors

    async def _commit(self, batch: Batch, *cursors: Cursor, quiet: bool = False) -> None:
        """Append the batch; after a `quiet` one, of windows that decided nothing, the routes are the same."""
        state, found = batch.state, self._routes
        if not quiet and (found is None or rerouted(self._routed, state)):
            found = routes(state)
        rows = await self._ledger.append(
            batch.drafts,
            sends=batch.sends,
            cursors=cursors,
            routes=None if found == self._routes else found,
            sent_pos=self._relay.done_pos,
        )
        self._state = state
        if not quiet:
            self._routed, self._routes = state, found
        if batch.sends:
            self._relay.put([_send(rows[send.draft], send) for send in batch.sends])

    def _batch(self, known: dict[str, bytes]) -> Batch:
        return Batch(self._state, self._now, ORIGIN, BUS_EPOCH, known, self._traces)

    def _cursor(self, seq: int, message_id: str) -> Cursor:
        created = self._stream.created
        return Cursor(stream=EVT, bus_epoch=BUS_EPOCH, seq=seq, event_id=message_id, created=created)


def _send(row: Row, outgoing: Outgoing) -> Send:
    return Send(row.pos, outgoing.subject, row.raw, row.event_id, outgoing.traceparent)


def rebuild(ledger_url: str, head: Head) -> State:
    """Fold the rows of the ledger that stay, inputs and decisions alike: the next row is a lease."""
    state = core.initial()
    with Reader.open(ledger_url) as reader:
        for row in reader.find(types=LASTING):
            state = core.evolve(state, read(row))
    return structs.replace(state, pos=head.pos, now_us=head.ledger_us)


async def check_cursor(bus: Bus, cursor: Cursor | None, stream: StreamState) -> None:
    """Make sure that the bus is the one the ledger has read: same stream, same message at the cursor."""
    if cursor is None:
        return
    if cursor.created != stream.created:
        raise BusReplaced(cursor, f"a stream created at {stream.created}, not {cursor.created}")
    if stream.last_seq < cursor.seq:
        raise BusReplaced(cursor, f"only {stream.last_seq} messages")
    message = await bus.message(cursor.stream, cursor.seq) if cursor.event_id else None
    if message is not None and message.msg_id != cursor.event_id:
        raise BusReplaced(cursor, f"{message.msg_id} there")


async def serve(settings: Settings) -> None:
    """Run an arbitrator on a bus and a ledger until cancelled. Raises the errors of both, and BusReplaced."""
    ledger = await AsyncLedger.open(settings.ledger_url)
    try:
        async with await Bus.connect(settings.nats_url, "arbitrator") as bus:
            await bus.provision()
            stream = await bus.stream(EVT)
            await check_cursor(bus, await ledger.cursor(EVT), stream)
            state = await asyncio.to_thread(rebuild, settings.ledger_url, ledger.head)
            await Arbitrator(bus, ledger, state, stream).run()
    finally:
        await ledger.close()
