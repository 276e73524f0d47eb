"""The arbitrator's life: rebuild the state from the ledger, then pull, decide, commit, publish."""

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import aclosing
from typing import Never

import structlog

from kite import __version__, clock
from kite.bus import EVT, Bus, BusGap, Message, Outgoing, PubAck, StreamState
from kite.errors import Fault, KiteError
from kite.events import Origin, compose, new_id
from kite.ledger import AsyncLedger, Cursor, Ledger, Send
from kite_arbitrator import core, shipped
from kite_arbitrator.batch import Batch
from kite_arbitrator.intake import examine
from kite_arbitrator.reading import read
from kite_arbitrator.settings import Settings
from kite_arbitrator.state import State
from kite_schemas.envelope import Event
from kite_schemas.ledger import BusGap as GapRow
from kite_schemas.ledger import Created, LeaseTaken, Tick
from kite_schemas.policy import ChangeRequested

QUEUE_BATCHES_MAX = 8
"""How many pulled batches wait for the writer; beyond it the pull stops, and the bus keeps the rest."""

RELAY_SENDS_MAX = 256
RELAY_RETRY_S = 1.0
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


Work = Sequence[Message] | GapRow | None
"""What the writer is handed: a batch of messages, a gap among them, or a tick (None)."""


class Arbitrator:
    """Use `serve`. One task writes; the others hand it work or publish what it has committed."""

    def __init__(self, bus: Bus, ledger: AsyncLedger, state: State, stream: StreamState) -> None:
        self._bus = bus
        self._ledger = ledger
        self._state = state
        self._stream = stream
        self._now = LedgerClock(ledger.head.ledger_us)
        self._work: asyncio.Queue[Work] = asyncio.Queue(QUEUE_BATCHES_MAX)
        self._committed = asyncio.Event()

    async def run(self) -> None:
        """Take the lease and serve until cancelled."""
        await self._begin()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pull())
            tasks.create_task(self._tick())
            tasks.create_task(self._relay())
            tasks.create_task(self._write())

    async def _begin(self) -> None:
        head = self._ledger.head
        batch = self._batch()
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

    async def _pull(self) -> Never:
        cursor = await self._ledger.cursor(EVT)
        seq = cursor.seq if cursor else 0
        while True:
            try:
                async with aclosing(self._bus.pull(EVT, seq)) as batches:
                    async for messages in batches:
                        await self._work.put(messages)
                        seq = messages[-1].seq
            except BusGap as gap:
                log.error("bus_gap", stream=EVT, first=gap.first_seq, last=gap.last_seq)
                await self._work.put(GapRow(stream=EVT, first=gap.first_seq, last=gap.last_seq))
                seq = gap.last_seq

    async def _tick(self) -> Never:
        while True:
            policy = self._state.policy
            await asyncio.sleep((policy.arbitration.idle_tick_us if policy else clock.US_PER_S) / clock.US_PER_S)
            await self._work.put(None)

    async def _write(self) -> Never:
        while True:
            work = await self._work.get()
            batch = self._batch()
            match work:
                case None:
                    batch.write(Tick())
                    await self._commit(batch)
                case GapRow():
                    batch.write(work)
                    await self._commit(batch, self._cursor(work.last, ""))
                case messages:
                    await self._take(batch, messages)

    async def _take(self, batch: Batch, messages: Sequence[Message]) -> None:
        began_us = clock.mono_us()
        examined = [examine(message) for message in messages]
        known = await self._ledger.known([found.header.id for found in examined if isinstance(found, Event)])
        for message, found in zip(messages, examined, strict=True):
            event_id = found.header.id if isinstance(found, Event) else ""
            batch.take(message, found, known.get(event_id), BUS_EPOCH)
            known.setdefault(event_id, message.payload)
        await self._commit(batch, self._cursor(messages[-1].seq, messages[-1].msg_id or ""))
        if batch.decided:
            log.info("decided", inputs=len(messages), decisions=batch.decided, took_us=clock.mono_us() - began_us)

    async def _commit(self, batch: Batch, *cursors: Cursor) -> None:
        await self._ledger.append(batch.drafts, sends=batch.sends, cursors=cursors)
        self._state = batch.state
        if batch.sends:
            self._committed.set()

    async def _relay(self) -> Never:
        """Publish the outbox in order of position; what a crash left there goes first."""
        self._committed.set()
        while True:
            await self._committed.wait()
            self._committed.clear()
            while sends := await self._ledger.pending(RELAY_SENDS_MAX):
                await self._publish(sends)

    async def _publish(self, sends: Sequence[Send]) -> None:
        outcomes = await self._bus.publish_many([_outgoing(send) for send in sends])
        acked = [send.pos for send, out in zip(sends, outcomes, strict=True) if isinstance(out, PubAck)]
        failures = [out for out in outcomes if not isinstance(out, PubAck)]
        if acked:
            await self._ledger.sent(acked[-1])
        if failures and not failures[0].retryable:
            raise failures[0]
        if failures:
            log.warning("publish_waits", error=str(failures[0]))
            await asyncio.sleep(RELAY_RETRY_S)

    def _batch(self) -> Batch:
        return Batch(self._state, self._now, ORIGIN)

    def _cursor(self, seq: int, message_id: str) -> Cursor:
        created = self._stream.created
        return Cursor(stream=EVT, bus_epoch=BUS_EPOCH, seq=seq, event_id=message_id, created=created)


def _outgoing(send: Send) -> Outgoing:
    headers = {"traceparent": send.traceparent} if send.traceparent else {}
    return Outgoing(send.subject, send.payload, send.event_id, headers)


def rebuild(ledger: Ledger) -> State:
    """Fold every row of the ledger, inputs and decisions alike."""
    state = core.initial()
    for row in ledger.rows():
        state = core.evolve(state, read(row))
    return state


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
            state = await ledger.run(rebuild)
            await Arbitrator(bus, ledger, state, stream).run()
    finally:
        await ledger.close()
