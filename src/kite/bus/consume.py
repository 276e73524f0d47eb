"""Reading streams: `pull` in exact order without acknowledgements, `work` with them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from kite.bus.errors import BusGap, BusUnreachable, StreamChanged, StreamMissing
from kite.bus.feed import NS_PER_S, Feed, FeedLost
from kite.bus.link import RETRY_S, Link, NotNow
from kite.bus.mark import Mark, epoch_end
from kite.bus.message import Message, from_delivery, parse_delivery
from kite.bus.streams import any_message, get_message, next_message, read_state
from kite.bus.subjects import escape
from kite.trust import parse, verifies

PULL_MSGS = 256
WORK_MSGS = 32
IDLE_S = 2.0  # heartbeat of a quiet stream
EPHEMERAL_S = 60.0  # the server forgets a reader that has not asked for so long
ACK_WAIT_S = 30.0
ACK_PENDING_MSGS = 256
ACK_S = 5.0

log: structlog.stdlib.BoundLogger = structlog.get_logger()

OpenFeed = Callable[[], Awaitable[Feed]]


def filters_of(filter_subject: str | Sequence[str] | None) -> list[str]:
    """Normalise the filter of a reader to a list; empty means everything."""
    if filter_subject is None:
        return []
    return [filter_subject] if isinstance(filter_subject, str) else list(filter_subject)


def _message(msg: Msg) -> Message:
    return from_delivery(msg.subject, msg.reply, msg.data, msg.headers)


async def _insist(link: Link, open_feed: OpenFeed, stream: str) -> Feed:
    """Open a feed, for ever: the server may be away. What trying again cannot heal is raised."""
    said = ""
    while True:
        await link.ready()
        try:
            return await open_feed()
        except NotNow as error:
            if said != (said := str(error)):  # once, not at every try
                log.warning("bus_reader_waits", stream=stream, reason=said)
            await asyncio.sleep(RETRY_S)


async def complete(link: Link, stream: str, last: int, fresh: Sequence[Message]) -> tuple[list[Message], BusGap | None]:
    """Return `fresh` as a run without holes after `last`, filled by direct get, and the first hole that could not be.

    The run ends before that hole. Raises NotNow when the server cannot answer.
    """
    run: list[Message] = []
    for message in fresh:
        while message.seq > last + 1:
            found = await next_message(link, stream, last + 1)
            if found is None or found.seq > last + 1:
                end = message.seq if found is None else min(found.seq, message.seq)
                return run, BusGap(stream, last + 1, end - 1)
            log.warning("bus_gap_repaired", stream=stream, seq=found.seq)
            run.append(found)
            last = found.seq
        run.append(message)
        last = message.seq
    return run, None


class _Reader:
    """An ephemeral consumer, made anew after whatever kills it, from where it was, if that is still there."""

    def __init__(self, link: Link, stream: str, filters: list[str], *, mark: Mark, batch: int, idle_s: float) -> None:
        self._link = link
        self._stream = stream
        self._filters = filters
        self._batch = batch
        self._idle_s = idle_s
        self.mark = mark

    async def open(self) -> Feed:
        """Return a feed after the mark. The check comes last: what changes after it loses the feed, so that none is
        read unchecked. Raises StreamMissing, StreamChanged, NotNow.
        """
        feed = await self._feed()
        try:
            await self._check()
        except BaseException:  # also when cancelled: a feed that nobody has is closed by nobody
            await feed.close()
            raise
        return feed

    async def _feed(self) -> Feed:
        only = self._filters[0] if len(self._filters) == 1 else None  # then it stands in the request, for permissions
        name = f"read-{self._link.nc.new_inbox().rpartition('.')[2]}"
        config = ConsumerConfig(
            name=name,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.mark.seq + 1,
            ack_policy=AckPolicy.NONE,
            filter_subject=only,
            filter_subjects=None if only else self._filters or None,
            inactive_threshold=EPHEMERAL_S,
            mem_storage=True,
            num_replicas=1,
        )
        body = {"stream_name": self._stream, "config": config.as_dict()}
        await self._link.api(".".join(filter(None, ("CONSUMER.CREATE", self._stream, name, only))), body)
        feed = Feed(self._link, self._stream, name, batch=self._batch, idle_s=self._idle_s)
        await feed.open()
        return feed

    async def _check(self) -> None:
        mark = self.mark
        stored = await get_message(self._link, self._stream, mark.seq) if mark.seq else None
        state = await read_state(self._link, self._stream)  # after the message, which can be aged out any time
        if why := epoch_end(mark, state, stored):
            raise StreamChanged(self._stream, why=why, read=mark, state=state)
        self.mark = Mark.at(stored, state.created) if stored else replace(mark, created=state.created)

    async def read(self, feed: Feed) -> tuple[list[Message], BusGap | None]:
        """Return the next messages in order, and the hole after them if there is one. Raises FeedLost, NotNow."""
        last = self.mark.seq
        fresh = [message for message in map(_message, await feed.take()) if message.seq > last]
        run, gap = (fresh, None) if self._filters else await complete(self._link, self._stream, last, fresh)
        if run:
            self.mark = Mark.at(run[-1], self.mark.created)
        return run, gap


async def pull(
    link: Link,
    stream: str,
    after: Mark | int,
    filter_subject: str | Sequence[str] | None = None,
    *,
    batch: int = PULL_MSGS,
    idle_s: float = IDLE_S,
) -> AsyncGenerator[list[Message]]:
    """Yield non-empty lists of messages after `after` in stream order, for ever; see `Bus.pull`."""
    mark = Mark(after) if isinstance(after, int) else after
    reader = _Reader(link, stream, filters_of(filter_subject), mark=mark, batch=batch, idle_s=idle_s)
    while True:
        feed = await _insist(link, reader.open, stream)
        try:
            while True:
                run, gap = await reader.read(feed)
                if run:
                    yield run
                if gap is not None:
                    raise gap
        except (FeedLost, NotNow) as error:
            log.info("bus_reader_lost", stream=stream, after_seq=reader.mark.seq, reason=str(error))
        finally:
            await feed.close()


class Work:
    """One order to carry out, delivered until it is acknowledged. `session` is that of the connection it came over.

    An acknowledgement names a place in a stream, not an order. Over a later connection the stream may be another one,
    or an older copy, with another order in that place.
    """

    def __init__(self, link: Link, msg: Msg, session: int) -> None:
        self._link = link
        self._session = session
        self._reply = msg.reply
        self.message = _message(msg)
        self.delivered = parse_delivery(msg.reply).delivered

    async def ack(self) -> bool:
        """Acknowledge, and wait until the server has it. False when it did not answer: the order comes again."""
        try:
            await self._link.ready(ACK_S)
            await self._recognise()
            await self._link.ask(self._reply, b"+ACK", ACK_S)
        except (NotNow, BusUnreachable) as error:
            log.warning("order_ack_lost", stream=self.message.stream, seq=self.message.seq, reason=str(error))
            return False
        return True

    async def in_progress(self) -> None:
        """Ask for another full acknowledgement time; lost without harm when disconnected."""
        if self._session == self._link.sessions:
            with suppress(NotNow):
                await self._link.send(self._reply, b"+WPI")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give the order back, to come again after `delay_s`; when disconnected, after its acknowledgement time."""
        body = b"-NAK " + json.dumps({"delay": int(delay_s * NS_PER_S)}).encode() if delay_s > 0 else b"-NAK"
        if self._session == self._link.sessions:
            with suppress(NotNow):
                await self._link.send(self._reply, body)

    async def _recognise(self) -> None:
        """Make sure that this order is still in its place. Raises NotNow when it is not, or nobody can tell."""
        while self._session != (session := self._link.sessions):
            stored = await any_message(self._link, self.message.stream, self.message.seq)
            if stored is None or stored.payload != self.message.payload:
                raise NotNow("the bus has another store, and another order in that place")
            self._session = session


class _Post:
    """A durable consumer: the place of one worker in the stream of decisions."""

    def __init__(self, link: Link, stream: str, config: ConsumerConfig, idle_s: float) -> None:
        self._link = link
        self._stream = stream
        self._config = config
        self._idle_s = idle_s

    async def open(self) -> Feed:
        name = str(self._config.durable_name)
        body = {"stream_name": self._stream, "config": self._config.as_dict()}
        try:
            await self._link.api(f"CONSUMER.CREATE.{self._stream}.{name}", body)  # again: no error
        except StreamMissing as error:  # a worker may be there before the arbitrator, which makes the streams
            raise NotNow(str(error)) from error
        feed = Feed(self._link, self._stream, name, batch=WORK_MSGS, idle_s=self._idle_s)
        await feed.open()
        return feed


async def work(
    link: Link,
    stream: str,
    durable: str,
    filter_subjects: Sequence[str],
    *,
    ack_wait_s: float = ACK_WAIT_S,
    max_ack_pending: int = ACK_PENDING_MSGS,
    idle_s: float = IDLE_S,
    trusted: bytes | None = None,
) -> AsyncGenerator[Work]:
    """Yield orders one by one, for ever; see `Bus.work`."""
    name = escape(durable)
    config = ConsumerConfig(
        name=name,
        durable_name=name,
        deliver_policy=DeliverPolicy.ALL,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ack_wait_s,
        max_ack_pending=max_ack_pending,
        filter_subjects=list(filter_subjects),
        # As many replicas as the stream has: else the worker would stand while one server of a cluster is away.
    )
    post = _Post(link, stream, config, idle_s)
    while True:
        feed = await _insist(link, post.open, stream)
        session = link.sessions
        taken: list[Work] = []
        try:
            while True:
                taken = [Work(link, msg, session) for msg in await feed.take()]
                while taken:
                    order = taken.pop(0)
                    if trusted is None or await _genuine(order, trusted):
                        yield order
        except (FeedLost, NotNow) as error:
            log.info("bus_worker_lost", stream=stream, durable=durable, reason=str(error))
        finally:
            await feed.close()
            await _return(link, [*taken, *(Work(link, msg, session) for msg in feed.drain())])


async def _genuine(order: Work, trusted: bytes) -> bool:
    """Tell whether the holder of a key signed an order; one that it did not is acknowledged, so that it stays away.

    Whoever may read one message of any stream can have the answer sent to any subject (2.15.1): past all permissions,
    it is stored as if it had been published there.
    """
    message = order.message
    signature = parse(message.signature)
    if signature is not None and verifies(trusted, message.payload, signature.value):
        return True
    log.error("order_forged", stream=message.stream, seq=message.seq, subject=message.subject, signed=bool(signature))
    with suppress(NotNow):
        await order.ack()
    return False


async def _return(link: Link, unseen: Sequence[Work]) -> None:
    """Give back what was fetched and never handed out, so that the next worker need not wait for it."""
    if not link.is_connected:
        return
    for order in unseen:
        await order.nak()
